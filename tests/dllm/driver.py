"""Drives dispatcher and engines step by step, without a loop, over a worker that checks what it is told."""

import random
from collections import deque

from genserve.core.control import Done, Failed, Message, Run, Send, Timer, WakeAt
from genserve.core.errors import StaleTensor, TensorError, TransferFailed
from genserve.core.kv.parts import KvPart
from genserve.core.tensors.ref import StoreAddress, TensorRef
from genserve.core.types import Abort, SamplingParams, Submit
from genserve.dllm.cache import LASTING
from genserve.dllm.canvas import OPEN, Canvas
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import EngineBack, EngineLost
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import (
    FETCH,
    RELEASE,
    STEP,
    Commit,
    Denoised,
    Handover,
    StepResult,
)

EOS = 2
VOCABULARY = 50
LIMITS = EngineLimits(
    num_pages=64,
    max_context_tokens=256,
    max_running=8,
    budget_tokens=96,
    page_tokens=4,
    fill_token_id=EOS,
    eos_token_ids=(EOS,),
)


class Slot:
    def __init__(self, admit):
        self.admit = admit
        self.canvas = Canvas(
            admit.ids,
            admit.prompt_len,
            admit.answer_end,
            admit.params.block_length,
            aligned=admit.params.cache == "block",
            stop_ids=admit.sampling.stop_token_ids,
        )
        self.pages = []
        self.block = None
        self.num_passes = 0
        self.is_new = True
        if admit.resume is not None:
            self.block, self.num_passes = admit.resume
            self.is_new = False


class Store:
    """What workers keep for each other: `kept` maps a number to owner and request.

    `num_failures` fetches to come will fail, and `num_refusals` times nothing will be kept.
    """

    def __init__(self):
        self.kept = {}
        self.num_kept = 0
        self.num_failures = 0
        self.num_refusals = 0

    def lose(self, owner):
        self.kept = {number: item for number, item in self.kept.items() if item[0] is not owner}

    def keep(self, owner, request_id, state, num_pages):
        if num_pages == 0:
            return Handover(state)
        if self.num_refusals:
            self.num_refusals -= 1
            return None
        self.num_kept += 1
        self.kept[self.num_kept] = (owner, request_id)
        ref = TensorRef("shm", StoreAddress("store", "here"), 1, self.num_kept, 0, 4, (4,), "uint8")
        return Handover(state, num_pages, (KvPart(0, 1, ref),))

    def fetch(self, args):
        assert len(args.pages) == len(set(args.pages)) > 0
        for part in args.parts:
            if part.ref.generation not in self.kept:
                raise StaleTensor("what was kept is gone")
        if self.num_failures:
            self.num_failures -= 1
            raise TransferFailed("made to fail")

    def release(self, args):
        for part in args.parts:
            assert self.kept.pop(part.ref.generation)[1] == args.request_id


class CheckingWorker:
    """Commits a random subset of the open positions: a function of (seed, block, pass) alone.

    Checks every step against the contract: slots, pages, spans and blocks.
    """

    def __init__(self, limits, eos_probability=0.05, store=None):
        self.limits = limits
        self.eos_probability = eos_probability
        self.slots = {}
        self.steps = []
        self.store = store if store is not None else Store()

    def perform(self, args, op=STEP):
        if op == FETCH:
            return self.store.fetch(args)
        if op == RELEASE:
            return self.store.release(args)
        self.steps.append(args)
        for slot in args.freed:
            del self.slots[slot]
        for admit in args.admits:
            assert admit.slot not in self.slots
            assert 0 <= admit.slot < self.limits.max_running
            self.slots[admit.slot] = Slot(admit)
        assert args.passes and len({p.slot for p in args.passes}) == len(args.passes)
        assert {admit.slot for admit in args.admits} <= {p.slot for p in args.passes}
        result = StepResult(tuple([self._pass(p) for p in args.passes]))
        held = [page for slot in self.slots.values() for page in set(slot.pages)]
        if not any(slot.admit.params.cache == "block" for slot in self.slots.values()):
            assert len(held) == len(set(held)), "a page belongs to two requests"
        return result

    def _pass(self, p):
        slot = self.slots[p.slot]
        canvas, admit = slot.canvas, slot.admit
        params = admit.params
        slot.pages.extend(p.new_pages)
        assert len(slot.pages) == self.limits.pages_for(len(canvas), params), "the whole canvas is leased"
        index, start, end = p.block
        assert (start, end) == (canvas.block(index).start, canvas.block(index).end)
        assert p.is_start == (slot.block != index)
        rows = [row for first, last in p.spans for row in range(first, last)]
        assert rows == sorted(set(rows)) and rows[0] >= 0 and rows[-1] < len(canvas)
        open_rows = canvas.open_positions(start, end)
        assert open_rows, "nothing to denoise"
        assert not canvas.open_positions(canvas.prompt_len, start), "blocks run from left to right"
        assert canvas.first_stop is None or not params.early_stop or canvas.first_stop >= start
        assert set(open_rows) <= set(rows)
        if self.limits.shifted and (params.cache == "dkv" or params.first_position == "left_neighbour"):
            assert {max(0, row - 1) for row in open_rows} <= set(rows), "a row that predicts is missing"
        if params.cache in ("none", "prefix", "dual"):
            left = self.limits.shifted and params.first_position == "left_neighbour"
            first = 0 if params.cache == "none" else max(0, start - left)
            last = end if params.cache == "dual" else len(canvas)
            assert rows == list(range(0 if p.is_start else first, len(canvas) if p.is_start else last))
            assert slot.is_new == p.is_start
        if p.is_start:
            slot.block, slot.num_passes = index, 0
        slot.is_new = False
        rng = random.Random(f"{admit.sampling.seed} {index} {slot.num_passes}")
        slot.num_passes += 1
        chosen = sorted(rng.sample(open_rows, rng.randint(1, max(1, len(open_rows) // 2))))
        commits = []
        for position in chosen:
            token = EOS if rng.random() < self.eos_probability else rng.randrange(3, VOCABULARY)
            canvas.commit(position, token)
            commits.append(Commit(position, token, 0.5))
        filled = params.early_stop and canvas.fill_after_stop(EOS)
        done = not canvas.has_open(start, end)
        handover = None
        if p.hand_over and (not done or params.cache in LASTING):
            state = (slot.block, slot.num_passes)
            num_pages = 0 if params.cache == "none" else len(slot.pages)
            handover = self.store.keep(self, admit.request_id, state, num_pages)
        return Denoised(p.slot, tuple(commits), filled, done, handover=handover)


class Driver:
    """`run(submits)` returns {request id: outputs}. Accounts are checked after each step of any engine.

    `roles` (one an engine, in place of `num_engines`) come with `overload_tokens`. Steps end with `step`, runs
    of links with `link`.
    """

    def __init__(
        self,
        num_engines=1,
        limits=LIMITS,
        routing="least_outstanding",
        worker=CheckingWorker,
        roles=None,
        overload_tokens=None,
        **options,
    ):
        self.limits = limits
        roles = roles if roles is not None else ["colocated"] * num_engines
        names = {f"engine-{index}": role for index, role in enumerate(roles)}
        self.dispatcher = Dispatcher(names, limits, routing, overload_tokens=overload_tokens)
        self.engines = {name: Engine(name, limits) for name in names}
        self.store = Store()
        if worker is CheckingWorker:
            options["store"] = self.store
        self.workers = {name: worker(limits, **options) for name in names}
        self.running = {}
        self.links = deque()
        self.told = []
        self.outputs = {}
        self.timers = {}
        self.now = 0.0
        self.mail = deque()

    def submit(self, *submits):
        for submit in submits:
            self.outputs.setdefault(submit.request_id, [])
            self.post("dispatcher", submit)

    def abort(self, request_id):
        self.post("dispatcher", Abort(request_id))

    def post(self, to, body, sender="test"):
        self.mail.append((to, Message(sender, body)))
        self.settle()

    def settle(self):
        """Deliver until nobody has anything to say."""
        asked = False
        while self.mail or not asked:
            if not self.mail:
                asked = True
            touched = ["dispatcher", *self.engines] if asked else []
            while self.mail:
                to, event = self.mail.popleft()
                controller = self.dispatcher if to == "dispatcher" else self.engines.get(to)
                if controller is not None:
                    controller.observe(event, self.now)
                    touched.append(to)
            for name in dict.fromkeys(touched):
                controller = self.dispatcher if name == "dispatcher" else self.engines.get(name)
                if controller is not None:
                    for effect in controller.decide(self.now):
                        self._perform(name, effect)

    def _perform(self, name, effect):
        if isinstance(effect, WakeAt):
            self.timers[effect.tag] = effect.time_s
        elif isinstance(effect, Run) and effect.lane == f"link-{name[-1]}":
            self.links.append((name, effect))
        elif isinstance(effect, Run):
            assert name not in self.running
            assert effect.lane == f"device-{name[-1]}"
            self.running[name] = effect
        else:
            assert isinstance(effect, Send)
            if effect.to == "gateway":
                for output in effect.body:
                    heard = self.outputs[output.request_id]
                    assert not heard or heard[-1].finish_reason is None, "something came after the end"
                    heard.append(output)
            elif effect.to == "membership":
                self.told.append(effect.body)
            else:
                self.mail.append((effect.to, Message(name, effect.body)))

    def step(self, name=None, error=None, lost=False):
        """End one engine's step (the first that runs, by default); False when none runs."""
        if not self.running:
            return False
        name = name if name is not None else next(iter(self.running))
        run = self.running.pop(name)
        self.now += 1.0
        for tag in sorted(tag for tag, time_s in self.timers.items() if time_s <= self.now):
            del self.timers[tag]
            self.mail.append(("dispatcher", Timer(tag)))
        if error is not None:
            event = Failed(run.lane, run.run_id, error, lost)
        else:
            event = Done(run.lane, run.run_id, self.workers[name].perform(run.args))
        self.mail.append((name, event))
        self.settle()
        self.check_accounts()
        return True

    def link(self, error=None):
        """End the run that any link began first; False when there is none."""
        if not self.links:
            return False
        name, run = self.links.popleft()
        if error is None:
            try:
                self.workers[name].perform(run.args, run.op)
            except TensorError as raised:
                error = str(raised)
        done = Done(run.lane, run.run_id, None)
        self.mail.append((name, done if error is None else Failed(run.lane, run.run_id, error)))
        self.settle()
        self.check_accounts()
        return True

    def lose(self, name):
        del self.engines[name]
        self.running.pop(name, None)
        self.links = deque([item for item in self.links if item[0] != name])
        self.store.lose(self.workers[name])
        self.post("dispatcher", EngineLost(name, "gone"))

    def bring_back(self, name):
        self.engines[name] = Engine(name, self.limits)
        self.workers[name].slots.clear()
        self.post("dispatcher", EngineBack(name))

    def check_accounts(self):
        for engine in self.engines.values():
            stats = engine.stats()
            assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"]
            assert stats["num_leases"] + stats["num_free_slots"] == self.limits.max_running

    def run(self, *submits):
        self.submit(*submits)
        while self.step() or self.link():
            pass
        self.check_empty()
        return self.outputs

    def check_empty(self):
        for engine in self.engines.values():
            stats = engine.stats()
            assert stats["num_sequences"] == stats["num_leases"] == stats["num_used_pages"] == 0
            assert stats["num_staged"] == stats["num_staged_pages"] == stats["num_fetching"] == 0
        assert not self.store.kept
        stats = self.dispatcher.stats()
        for name in ("sequences", "waiting", "held", "held_pages", "kept_pages", "outstanding_tokens"):
            assert stats[f"num_{name}"] == 0, name
        for outputs in self.outputs.values():
            assert outputs[-1].finish_reason is not None

    def tokens(self, request_id):
        return [token for output in self.outputs[request_id] for token in output.token_ids]


def submit(request_id, num_prompt=10, max_tokens=20, seed=0, deadline_s=None, ignore_eos=False, **params):
    params.setdefault("block_length", 8)
    sampling = SamplingParams(
        temperature=0,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logprobs=params.pop("logprobs", None),
    )
    prompt = tuple(random.Random(f"prompt {seed}").choices(range(3, VOCABULARY), k=num_prompt))
    return Submit(request_id, prompt, sampling, deadline_s=deadline_s, options=DiffusionParams(**params))


def answer(body, eos_probability=0.05):
    """Tokens that the checking worker gives the request alone."""
    driver = Driver(eos_probability=eos_probability)
    driver.run(body)
    return driver.tokens(body.request_id)


__all__ = ["EOS", "LIMITS", "OPEN", "CheckingWorker", "Driver", "answer", "submit"]
