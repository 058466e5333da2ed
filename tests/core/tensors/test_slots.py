"""Holders and generations, under any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genserve.core.errors import StaleTensor, StoreFull, TensorError
from genserve.core.tensors.allocator import ALIGNMENT
from genserve.core.tensors.slots import Slots, units_of

NUM_UNITS = 40
HOLDERS = st.sets(st.sampled_from("abcd"), min_size=1)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = [0] * NUM_UNITS
        self.slots = Slots(NUM_UNITS * ALIGNMENT, self.table)
        self.drafts: list = []
        self.live: dict[tuple[int, int], tuple[int, set[str]]] = {}  # offset, generation -> size, holders
        self.dead: list[tuple[int, int, int]] = []
        self.generations: set[int] = set()

    @rule(size=st.integers(0, 12 * ALIGNMENT), holders=HOLDERS)
    def allocate(self, size, holders):
        free_before = self.slots.stats()["largest_free_bytes"]
        try:
            slot = self.slots.allocate(size, holders)
        except StoreFull:
            assert max(size, 1) > free_before
        else:
            self.drafts.append((slot, set(holders)))

    @precondition(lambda self: self.drafts)
    @rule(index=st.integers(0, 99), keep=st.booleans())
    def finish(self, index, keep):
        slot, holders = self.drafts.pop(index % len(self.drafts))
        if not keep:
            self.slots.abandon(slot)
            self.slots.abandon(slot)
            return
        generation = self.slots.seal(slot)
        assert generation not in self.generations
        self.generations.add(generation)
        if holders:
            self.live[slot.offset, generation] = (slot.nbytes, holders)
        else:
            self.dead.append((slot.offset, generation, slot.nbytes))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), holder=st.sampled_from("abcde"))
    def release(self, index, holder):
        offset, generation = sorted(self.live)[index % len(self.live)]
        self.slots.release(offset, generation, holder)
        self._let_go({(offset, generation)}, holder)

    @rule(holder=st.sampled_from("abcde"))
    def drop_holder(self, holder):
        self.slots.drop_holder(holder)
        self._let_go(set(self.live), holder)
        for _, holders in self.drafts:
            holders.discard(holder)

    @precondition(lambda self: self.dead)
    @rule(index=st.integers(0, 99), holder=st.sampled_from("abcd"))
    def release_a_stale_one(self, index, holder):
        offset, generation, _ = self.dead[index % len(self.dead)]
        self.slots.release(offset, generation, holder)

    def _let_go(self, keys, holder):
        for key in keys:
            size, holders = self.live[key]
            holders.discard(holder)
            if not holders:
                del self.live[key]
                self.dead.append((*key, size))

    @invariant()
    def the_living_are_found_and_the_dead_are_not(self):
        for (offset, generation), (size, _) in self.live.items():
            self.slots.find(offset, generation, size)
            first, last = units_of(offset, size)
            assert self.table[first] == self.table[last] == generation
        for offset, generation, size in self.dead[-20:]:
            with pytest.raises(StaleTensor):
                self.slots.find(offset, generation, size)
            first, last = units_of(offset, size)
            assert generation not in (self.table[first], self.table[last])

    @invariant()
    def used_and_free_are_all(self):
        stats = self.slots.stats()
        sizes = [size for size, _ in self.live.values()] + [slot.nbytes for slot, _ in self.drafts]
        assert stats["used_bytes"] == sum(max(-(-size // ALIGNMENT), 1) * ALIGNMENT for size in sizes)
        assert stats["used_bytes"] + stats["free_bytes"] == stats["pool_bytes"]
        assert stats["num_tensors"] == len(sizes)
        held = set().union(*(h for _, h in self.live.values()), *(h for _, h in self.drafts))
        assert stats["num_holders"] == len(held)

    def teardown(self):
        for slot, _ in self.drafts:
            self.slots.abandon(slot)
        for holder in "abcd":
            self.slots.drop_holder(holder)
        assert self.table == [0] * NUM_UNITS
        assert self.slots.stats()["used_bytes"] == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_less_than_no_bytes_are_refused():
    slots = Slots(NUM_UNITS * ALIGNMENT, [0] * NUM_UNITS)
    with pytest.raises(TensorError, match="nbytes"):
        slots.allocate(-ALIGNMENT, ["a"])
    assert slots.stats()["largest_free_bytes"] == NUM_UNITS * ALIGNMENT
