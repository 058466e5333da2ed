"""The autoregressive engine's controller: continuous batching with chunked prefill over paged KV.

Owns the queue, the running set, the page accounts and each sequence's token ids; must not know
tensors, threads or clocks. One step is in flight at a time: `decide` plans it (decodes first, then
prefill chunks within the token budget), `observe(Done)` folds its tokens in. KV can always be
rebuilt from token ids, so running out of pages preempts the youngest sequence and recomputes it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from genserve.ar.step import Admit, Row, Sampled, StepArgs, StepResult
from genserve.core.control import Done, Effect, Event, Failed, Message, Run, Send, Timer, WakeAt
from genserve.core.kv.blocks import NO_MATCH, PAGE_TOKENS, KvPages, PageLease, PrefixMatch
from genserve.core.scheduling.budget import PrefillNeed, plan_prefills
from genserve.core.types import DEADLINE_EXCEEDED, Abort, FinishReason, Submit, TokenLogprobs, TokenOutput

DEVICE_LANE = "device"
STEP = "step"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds an engine. `budget_tokens` is the most tokens one step computes."""

    num_pages: int
    max_context_tokens: int
    max_running: int = 64
    budget_tokens: int = 512
    page_tokens: int = PAGE_TOKENS
    prefix_cache: bool = True
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.budget_tokens < self.max_running:
            raise ValueError(
                f"budget_tokens ({self.budget_tokens}) must cover one token of each of the "
                f"max_running ({self.max_running}) sequences"
            )


class Sequence:
    """One request's tokens and where it stands. `token_ids` grows; KV exists for `num_computed`."""

    __slots__ = (
        "first_cached_tokens",
        "has_deadline",
        "lease",
        "max_total_tokens",
        "num_computed",
        "num_pages_sent",
        "num_preemptions",
        "num_prompt",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "stop_ids",
        "token_ids",
    )

    def __init__(self, submit: Submit, limits: EngineLimits) -> None:
        sampling = submit.sampling
        self.request_id = submit.request_id
        self.sampling = sampling
        self.token_ids = list(submit.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        # Beyond the pool nothing could ever be kept: an open-ended request ends there.
        most = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)
        wanted = most if sampling.max_tokens is None else self.num_prompt + sampling.max_tokens
        self.max_total_tokens = min(most, wanted)
        eos_ids = () if sampling.ignore_eos else limits.eos_token_ids
        self.stop_ids = frozenset((*eos_ids, *sampling.stop_token_ids))
        self.has_deadline = submit.deadline_s is not None
        self.lease: PageLease | None = None
        self.slot = -1
        self.num_computed = 0
        self.num_pages_sent = 0
        self.num_preemptions = 0
        self.first_cached_tokens = -1
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] if sampling.prompt_logprobs is not None else None
        )

    @property
    def is_in_prompt(self) -> bool:
        """Whether its prompt has never been computed to the end."""
        return self.num_computed < self.num_prompt == len(self.token_ids)

    @property
    def uses_cache(self) -> bool:
        return self.sampling.prompt_logprobs is None

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """They are told once, with the first output; what a recomputation yields again is dropped."""
        told, self.prompt_logprobs = self.prompt_logprobs, None
        return None if told is None else tuple(told)


class Engine:
    """The `Controller` of one model on one device. Outputs go to `reply_to`, one `Send` a step."""

    def __init__(self, limits: EngineLimits, reply_to: str = "gateway") -> None:
        self.limits = limits
        self.pages = KvPages(limits.num_pages, limits.page_tokens, limits.prefix_cache)
        self._reply_to = reply_to
        self._sequences: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._parked: dict[str, list[Sequence]] = {}
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._admits: list[Admit] = []
        self._outbox: list[TokenOutput] = []
        self._timers: list[WakeAt] = []
        self._flight: list[tuple[Sequence, Row]] | None = None
        self._run_id = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_cached_tokens = 0

    # -- facts ---------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        if isinstance(event, Done):
            self._on_step(event.result)
        elif isinstance(event, Message):
            if isinstance(event.body, Submit):
                self._on_submit(event.body)
            elif isinstance(event.body, Abort):
                self._end(event.body.request_id, "abort")
            else:
                raise TypeError(f"engine got a message it does not know: {type(event.body).__name__}")
        elif isinstance(event, Failed):
            self._on_failed(event)
        elif isinstance(event, Timer):
            sequence = self._sequences.get(event.tag)
            if sequence is not None and sequence.has_deadline:  # else it was an earlier one of that name
                self._end(event.tag, "error", DEADLINE_EXCEEDED)

    def _on_submit(self, submit: Submit) -> None:
        problem = self._refusal(submit)
        if problem is not None:
            self._outbox.append(TokenOutput(submit.request_id, finish_reason="error", error=problem))
            return
        sequence = Sequence(submit, self.limits)
        # Looked up before it is known itself: one that names itself waits for nobody.
        leader = self._sequences.get(submit.after) if submit.after is not None else None
        self._sequences[submit.request_id] = sequence
        if submit.deadline_s is not None:
            self._timers.append(WakeAt(submit.deadline_s, submit.request_id))
        if leader is not None and leader.is_in_prompt:
            self._parked.setdefault(leader.request_id, []).append(sequence)
        else:
            self._waiting[submit.request_id] = sequence

    def _refusal(self, submit: Submit) -> str | None:
        num_prompt = len(submit.prompt_token_ids)
        total = num_prompt + (submit.sampling.max_tokens or 0)
        pool_tokens = self.pages.num_pages * self.pages.page_tokens
        if submit.request_id in self._sequences:
            return f"request id {submit.request_id!r} is already in use"
        if num_prompt == 0:
            return "the prompt is empty"
        if total > self.limits.max_context_tokens:
            return f"{total} tokens exceed the context of {self.limits.max_context_tokens}"
        if total > pool_tokens:
            return f"{total} tokens exceed the KV pool of {pool_tokens} tokens"
        return None

    def _on_step(self, result: StepResult) -> None:
        flight, self._flight = self._flight or [], None
        for slot, entries in result.prompt_logprobs:
            for sequence, row in flight:
                if row.slot == slot and sequence.prompt_logprobs is not None:
                    sequence.prompt_logprobs.extend(entries)
        sampled = iter(result.sampled)
        page_tokens = self.pages.page_tokens
        alive = self._sequences
        for sequence, row in flight:
            choice = next(sampled) if row.sample else None
            if alive.get(sequence.request_id) is not sequence:
                continue
            before, sequence.num_computed = sequence.num_computed, row.start + row.num_tokens
            if choice is not None and choice.error is not None:
                # Its KV may be as broken as its logits, so none of it enters the prefix cache.
                self._end(sequence.request_id, "error", choice.error)
                continue
            if before // page_tokens != sequence.num_computed // page_tokens and sequence.uses_cache:
                sequence.lease.index(sequence.token_ids, sequence.num_computed)  # type: ignore[union-attr]
            if before < sequence.num_prompt <= sequence.num_computed and self._parked:
                self._unpark(sequence.request_id)
            if choice is not None:
                self._append(sequence, choice)
            elif sequence.num_computed >= sequence.max_total_tokens:
                self._end(sequence.request_id, "length")

    def _append(self, sequence: Sequence, choice: Sampled) -> None:
        token_id = choice.token_id
        sequence.token_ids.append(token_id)
        reason: FinishReason | None = None
        if token_id in sequence.stop_ids:
            reason = "stop"
        elif len(sequence.token_ids) >= sequence.max_total_tokens:
            reason = "length"
        logprobs = (choice.logprobs,) if choice.logprobs is not None else ()
        first = len(sequence.token_ids) == sequence.num_prompt + 1
        if reason is None and not first:
            self._outbox.append(TokenOutput(sequence.request_id, (token_id,), logprobs))
            return
        self._outbox.append(
            TokenOutput(
                sequence.request_id,
                (token_id,),
                logprobs,
                finish_reason=reason,
                stop_token_id=token_id if reason == "stop" else None,
                num_cached_tokens=sequence.first_cached_tokens if first else 0,
                prompt_logprobs=sequence.take_prompt_logprobs(),
            )
        )
        if reason is not None:
            self._forget(sequence)

    def _on_failed(self, event: Failed) -> None:
        flight, self._flight = self._flight or [], None
        victims = list(self._sequences.values()) if event.lost else [sequence for sequence, _ in flight]
        for sequence in victims:
            if self._sequences.get(sequence.request_id) is sequence:
                self._end(sequence.request_id, "error", event.error)

    # -- endings -------------------------------------------------------------------------------

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        nothing_told = len(sequence.token_ids) == sequence.num_prompt
        self._outbox.append(
            TokenOutput(
                request_id,
                finish_reason=reason,
                error=error,
                num_cached_tokens=max(sequence.first_cached_tokens, 0) if nothing_told else 0,
                prompt_logprobs=sequence.take_prompt_logprobs(),
            )
        )
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds, whatever its state."""
        del self._sequences[sequence.request_id]
        if sequence.has_deadline:
            self._timers.append(WakeAt(math.inf, sequence.request_id))
        if sequence.slot >= 0:
            (self._decoding if sequence in self._decoding else self._prefilling).remove(sequence)
            self._leave_device(sequence)
        elif self._waiting.pop(sequence.request_id, None) is None:
            for leader, parked in self._parked.items():
                if sequence in parked:
                    parked.remove(sequence)
                    if not parked:
                        del self._parked[leader]
                    break
        if self._parked:
            self._unpark(sequence.request_id)

    def _leave_device(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            sequence.lease.release()
            sequence.lease = None
        self._freed.append(sequence.slot)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_computed = 0
        sequence.num_pages_sent = 0

    def _unpark(self, leader: str) -> None:
        for sequence in reversed(self._parked.pop(leader, ())):
            self._waiting[sequence.request_id] = sequence
            self._waiting.move_to_end(sequence.request_id, last=False)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_device(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)

    # -- plans ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Iterable[Effect]:
        effects: list[Effect] = []
        if self._flight is None and (self._decoding or self._prefilling or self._waiting):
            rows = self._plan_decodes()
            self._plan_prefills(rows)
            if rows:
                effects.append(self._launch(rows))
        if self._outbox:
            effects.append(Send(self._reply_to, tuple(self._outbox)))
            self._outbox.clear()
        if self._timers:
            effects.extend(self._timers)
            self._timers.clear()
        return effects

    def _launch(self, rows: list[tuple[Sequence, Row]]) -> Run:
        args = StepArgs(tuple(self._freed), tuple(self._admits), tuple([row for _, row in rows]))
        self._freed.clear()
        self._admits.clear()
        self._flight = rows
        self._run_id += 1
        self.num_steps += 1
        return Run(DEVICE_LANE, self._run_id, STEP, args)

    def _plan_decodes(self) -> list[tuple[Sequence, Row]]:
        """One row for each decoding sequence, oldest first; the youngest make room when pages end."""
        rows: list[tuple[Sequence, Row]] = []
        page_tokens = self.limits.page_tokens
        position = 0
        while position < len(self._decoding):
            sequence = self._decoding[position]
            num_tokens = len(sequence.token_ids)
            lease = sequence.lease
            assert lease is not None
            if num_tokens <= len(lease.pages) * page_tokens:
                rows.append((sequence, Row(sequence.slot, num_tokens - 1, 1, (), True)))
                position += 1
            elif lease.grow_to(num_tokens):
                rows.append((sequence, self._row(sequence, num_tokens - 1, 1)))
                position += 1
            else:
                victims = self._prefilling or self._decoding
                self._preempt(victims.pop())
        self.num_decode_tokens += len(rows)
        return rows

    def _plan_prefills(self, rows: list[tuple[Sequence, Row]]) -> None:
        if not self._prefilling and not self._waiting:
            return
        matches: dict[str, PrefixMatch] = {}
        # Decodes grow by a page every 16 tokens: leave some steps' worth, or the newcomer is
        # preempted as soon as it is in.
        room = self.pages.num_free - -(-len(self._decoding) // 4)

        def needs() -> Iterator[PrefillNeed]:
            for sequence in self._prefilling:
                yield PrefillNeed(sequence, len(sequence.token_ids) - sequence.num_computed)
            for _, sequence in zip(range(len(self._free_slots)), self._waiting.values(), strict=False):
                match = self.pages.match(sequence.token_ids) if sequence.uses_cache else NO_MATCH
                matches[sequence.request_id] = match
                num_cached = len(match.pages) * self.pages.page_tokens
                yield PrefillNeed(sequence, len(sequence.token_ids) - num_cached)

        def has_room(need: PrefillNeed) -> bool:
            nonlocal room
            sequence = need.key
            assert isinstance(sequence, Sequence)
            if sequence.slot >= 0:
                return True
            wanted = self.pages.num_free_needed(matches[sequence.request_id], len(sequence.token_ids))
            alone = not self._sequences_on_device and not matches.keys() - {sequence.request_id}
            if wanted > (self.pages.num_free if alone else room):
                return False
            room -= wanted
            return True

        for grant in plan_prefills(self.limits.budget_tokens, len(rows), needs(), has_room):
            sequence = grant.key
            assert isinstance(sequence, Sequence)
            if sequence.slot < 0 and not self._admit(sequence):
                break
            num_tokens = min(grant.num_tokens, len(sequence.token_ids) - sequence.num_computed)
            rows.append((sequence, self._row(sequence, sequence.num_computed, num_tokens)))
            self.num_prefill_tokens += num_tokens
            if sequence.num_computed + num_tokens == len(sequence.token_ids):
                self._prefilling.remove(sequence)
                self._decoding.append(sequence)

    @property
    def _sequences_on_device(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def _admit(self, sequence: Sequence) -> bool:
        """Lease pages for all known tokens and a slot. Admissions before it may have moved the cache."""
        match = self.pages.match(sequence.token_ids) if sequence.uses_cache else NO_MATCH
        lease = self.pages.open(match)
        if not lease.grow_to(len(sequence.token_ids)):
            lease.release()
            return False
        del self._waiting[sequence.request_id]
        sequence.lease = lease
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = lease.num_cached_tokens
        if sequence.first_cached_tokens < 0:
            sequence.first_cached_tokens = lease.num_cached_tokens
        self.num_cached_tokens += lease.num_cached_tokens
        self._admits.append(
            Admit(sequence.slot, tuple(sequence.token_ids), sequence.num_prompt, sequence.sampling)
        )
        self._prefilling.append(sequence)
        return True

    def _row(self, sequence: Sequence, start: int, num_tokens: int) -> Row:
        lease = sequence.lease
        assert lease is not None
        new_pages = tuple(lease.pages[sequence.num_pages_sent :])
        sequence.num_pages_sent += len(new_pages)
        num_known = len(sequence.token_ids)
        reaches_end = start + num_tokens == num_known
        sample = reaches_end and num_known < sequence.max_total_tokens
        return Row(sequence.slot, start, num_tokens, new_pages, sample)

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges and counters, all plain numbers."""
        return {
            "num_sequences": len(self._sequences),
            "num_waiting": len(self._waiting) + sum(map(len, self._parked.values())),
            "num_running": self._sequences_on_device,
            "num_free_slots": len(self._free_slots),
            "num_pages": self.pages.num_pages,
            "num_free_pages": self.pages.num_free,
            "num_used_pages": self.pages.num_used,
            "num_leases": self.pages.num_leases,
            "num_evictions": self.pages.num_evictions,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_decode_tokens": self.num_decode_tokens,
            "num_cached_tokens": self.num_cached_tokens,
        }
