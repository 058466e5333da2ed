"""Recorded generations of reference implementations as requests to our worker, and how they are compared.

The format is described in `tests/golden/README.md`. A case is data: whatever it asks for that a request
cannot express raises `Inexpressible` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genserve.core.types import SamplingParams
from genserve.dllm.cache import Passes, PlannedPass
from genserve.dllm.canvas import OPEN, Block, Canvas
from genserve.dllm.noise import NoiseKey
from genserve.dllm.request import DiffusionParams, Unmasking
from genserve.dllm.step import Admit, Denoised, Pass

CONFIDENCE_TOLERANCE = 2e-4
_DREAM_KINDS = {"maskgit_plus": "quota", "topk_margin": "margin", "entropy": "entropy", "origin": "random"}


class Inexpressible(Exception):
    """A case that no request can express, with the reason."""


def llada_unmasking(strategy: dict[str, Any]) -> Unmasking:
    kind = strategy["kind"]
    if kind == "threshold":
        return Unmasking("threshold", threshold=strategy["threshold"])
    if kind == "factor":
        return Unmasking("factor", factor=strategy["factor"], factor_rule=strategy["rule"])
    if kind in ("quota", "random"):
        return Unmasking(kind, steps=strategy["steps"])
    raise Inexpressible(f"strategy kind {kind!r}")


def dream_unmasking(strategy: dict[str, Any], cache: str, eps: float) -> Unmasking:
    """With a cache Dream ranks by entropy whatever `alg` says, thresholds aside."""
    alg = strategy["alg"]
    if alg == "confidence_threshold":
        steps = strategy["steps"] if cache == "none" else None
        return Unmasking("threshold", threshold=strategy["threshold"], steps=steps)
    if alg not in _DREAM_KINDS:
        raise Inexpressible(f"alg {alg!r}")
    kind: Any = _DREAM_KINDS[alg] if cache == "none" else "entropy"
    return Unmasking(kind, steps=strategy["steps"], schedule="linear", eps=eps, independent=kind == "random")


def llada2_params(case: dict[str, Any], num_blocks: int) -> DiffusionParams:
    """`diffusers` has a step schedule, and allows one pass more over a complete block than `hf`."""
    strategy, reference = case["strategy"], case["reference"]["name"]
    block_length, max_post, max_block = case["block_length"], strategy["max_post_steps"], None
    rule = Unmasking("threshold", threshold=strategy["threshold"], strict=True)
    if reference == "hf":
        rule = _with(rule, min_commits=strategy["num_to_transfer"])
    elif reference == "diffusers":
        max_block = min(strategy["steps"], case["gen_length"])
        rule = _with(rule, steps=max_block * num_blocks, steps_bound="least")
        max_post += 1
    else:
        raise Inexpressible(f"reference {reference!r}")
    return DiffusionParams(
        cache="block",
        unmasking=rule,
        block_length=block_length,
        editing_threshold=strategy["editing_threshold"],
        max_post_steps=max_post,
        max_block_steps=max_block,
        early_stop=False,
    )


def _with(rule: Unmasking, **changes: Any) -> Unmasking:
    from dataclasses import replace

    return replace(rule, **changes)


@dataclass(slots=True)
class Replay:
    """One case under way: what the engine would do for a single request, and what was recorded of it."""

    case: dict[str, Any]
    params: DiffusionParams
    canvas: Canvas
    shifted: bool
    slot: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    num_passes: int = 0
    error: str | None = None
    ended: bool = False
    _block: Block = field(init=False)
    _passes: Passes = field(init=False)
    _planned: PlannedPass | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        length = len(self.canvas)
        self._passes = Passes(self.params, length, self.canvas.prompt_len, shifted=self.shifted)
        self._block = self.canvas.block(0)
        self._passes.begin(self._block)

    @property
    def num_pages(self) -> int:
        return -(-len(self.canvas) // 16) * (2 if self.params.cfg_scale > 0 else 1)

    @property
    def eos_id(self) -> int | None:
        return self.case.get("eos_id") if self.case.get("early_stop") else None

    def admit(self) -> Admit:
        stop_ids = () if self.eos_id is None else (self.eos_id,)
        sampling = SamplingParams(temperature=0, seed=0, stop_token_ids=stop_ids)
        canvas = self.canvas
        return Admit(
            self.slot,
            self.case["id"],
            tuple(canvas.ids),
            canvas.prompt_len,
            canvas.answer_end,
            sampling,
            self.params,
        )

    def next(self, pages: Sequence[int]) -> Pass:
        """The coming pass; `pages` are the slot's, handed over with its first one."""
        self._planned = self._passes.next(self.canvas)
        block = (self._block.index, self._block.start, self._block.end)
        new_pages = () if self.num_passes else tuple(pages)
        return Pass(self.slot, self._planned.spans, new_pages, block, self._planned.is_start)

    def took(self, done: Denoised) -> None:
        """Fold in what a pass did, record it, and go to the next block or end."""
        planned, canvas, block = self._planned, self.canvas, self._block
        assert planned is not None
        self.num_passes += 1
        if done.error is not None:
            self.error, self.ended = done.error, True
            return
        edited = [commit.position for commit in done.commits if canvas.ids[commit.position] != OPEN]
        for commit in done.commits:
            canvas.commit(commit.position, commit.token_id)
        if done.filled and self.eos_id is not None:
            canvas.fill_after_stop(self.eos_id)
        self._passes.ran(planned, [commit.position for commit in done.commits])
        self.records.append(
            {
                **self._rows(planned),
                "pos": [commit.position for commit in done.commits],
                "tok": [commit.token_id for commit in done.commits],
                "conf": [commit.confidence for commit in done.commits],
                "edited": edited,
                "filled": done.filled,
            }
        )
        if self._stops_at_once(done):
            self.ended = True
        elif done.block_done:
            self.ended = self._stops_after_block() or block.index + 1 == canvas.num_blocks
            if not self.ended:
                self._block = canvas.block(block.index + 1)
                self._passes.begin(self._block)

    def _rows(self, planned: PlannedPass) -> dict[str, Any]:
        block, cache = self._block, self.params.cache
        if cache == "block":
            index = block.start // self.params.block_length
            return {"block": index, "fwd": "window", "start": block.start, "end": block.end}
        fwd = "full" if planned.is_start or cache == "none" else cache
        (start, end) = planned.spans[0]
        return {"block": block.index, "fwd": fwd, "start": start, "end": end}

    def _stops_at_once(self, done: Denoised) -> bool:
        wrote_eos = any(commit.token_id == self.eos_id for commit in done.commits)
        return self.case["reference"]["name"] == "diffusers" and wrote_eos and self.canvas.is_settled

    def _stops_after_block(self) -> bool:
        if self.case["reference"]["name"] == "diffusers":
            return False
        return self.eos_id is not None and self.canvas.first_stop is not None

    # Comparison.

    def differences(self, mask_id: int) -> list[str]:
        """What is not as recorded, the first few; idle passes are not expected."""
        if self.error is not None:
            return [f"error: {self.error}"]
        found: list[str] = []
        want = [step for step in self.case["steps"] if step["pos"]]
        got = [record for record in self.records if record["pos"]]
        for at, (theirs, ours) in enumerate(zip(want, got, strict=False)):
            found += [
                f"pass {at}: {key} {ours[key]} instead of {theirs[key]}"
                for key in ("block", "fwd", "start", "end", "pos", "tok")
                if ours[key] != theirs[key]
            ]
            if theirs.get("edited", []) != ours["edited"]:
                found.append(f"pass {at}: edited {ours['edited']} instead of {theirs.get('edited', [])}")
            pairs = zip(theirs["conf"], ours["conf"], strict=False)
            off = max((abs(a - b) for a, b in pairs), default=0.0)
            if off > CONFIDENCE_TOLERANCE:
                found.append(f"pass {at}: confidence off by {off:.1e}")
            if found:
                return found
        if len(got) != self.case["nfe_without_idle"]:
            found.append(f"{len(got)} passes instead of {self.case['nfe_without_idle']}")
        idle = sum(not (record["pos"] or record["filled"]) for record in self.records)
        if idle and self.params.editing_threshold is None:
            found.append(f"{idle} idle passes")
        final = [mask_id if token == OPEN else token for token in self.canvas.ids]
        if final != self.case["final"]:
            wrong = [p for p, (a, b) in enumerate(zip(final, self.case["final"], strict=False)) if a != b]
            found.append(f"final differs at {wrong[:8] or 'its length'}")
        return found


def replay_of(case: dict[str, Any]) -> Replay:
    """`Inexpressible` (or KeyError for a missing field) if the case cannot be replayed."""
    if not isinstance(case, dict):
        raise Inexpressible("not a JSON object")
    if case.get("format") != 1:
        raise Inexpressible(f"format {case.get('format')!r}")
    arch, cache, prompt = case["arch"], case["cache"], case["prompt"]
    if len(prompt) != case["prompt_len"]:
        raise Inexpressible("prompt_len is not the prompt's length")
    end = len(prompt) + case["gen_length"]
    eos_id = case.get("eos_id") if case.get("early_stop") else None
    if arch == "llada2":
        block_length = case["block_length"]
        end = -(-end // block_length) * block_length
        num_blocks = (end - len(prompt) // block_length * block_length) // block_length
        params = llada2_params(case, num_blocks)
    elif arch in ("llada", "dream"):
        if cache not in ("none", "prefix", "dual"):
            raise Inexpressible(f"cache {cache!r}")
        block_length = case["block_length"] or case["gen_length"]
        if arch == "dream" and cache == "none":
            block_length = case["gen_length"]
        params = DiffusionParams(
            cache=cache,
            unmasking=llada_unmasking(case["strategy"])
            if arch == "llada"
            else dream_unmasking(case["strategy"], cache, case["eps"]),
            block_length=block_length,
            cfg_scale=case.get("cfg_scale") or 0.0,
            early_stop=eos_id is not None,
            fill_at_block_start=False,
            stop_in_prompt=True,
            end_when_settled=False,
        )
    else:
        raise Inexpressible(f"arch {arch!r}")
    canvas = Canvas(
        [*prompt, *[OPEN] * (end - len(prompt))],
        len(prompt),
        end,
        params.block_length,
        aligned=params.cache == "block",
        stop_ids=() if eos_id is None else (eos_id,),
        stop_in_prompt=params.stop_in_prompt,
    )
    return Replay(case, params, canvas, arch == "dream")


def recorded_noise(
    replays: Sequence[Replay],
) -> Callable[[NoiseKey, Sequence[int]], list[float]]:
    """The draws that the references made: by row of the pass, or (`origin`) by rank among open positions."""
    cases = {replay.case["id"]: replay for replay in replays}

    def noise(key: NoiseKey, positions: Sequence[int]) -> list[float]:
        replay = cases[key.request_id]
        rand, steps = replay.case["rand"], replay.case["steps"]
        if replay.params.unmasking.independent:
            return rand[key.pass_number][: len(positions)]
        of_block = [at for at, step in enumerate(steps) if step["block"] == key.block]
        at = of_block[key.pass_number]
        return [rand[at][position - steps[at]["start"]] for position in positions]

    return noise
