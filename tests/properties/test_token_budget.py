"""The plan of one step's prefills: bounded, in order, decodes untouched, the same when asked twice."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from genserve.core.scheduling.budget import PrefillNeed, plan_prefills

needs = st.lists(
    st.builds(PrefillNeed, st.uuids(), st.integers(1, 80), st.booleans()),
    max_size=12,
    unique_by=lambda need: need.key,
)
divisible = needs.map(lambda items: [PrefillNeed(need.key, need.num_tokens) for need in items])
budgets = st.integers(1, 100)
decodes = st.integers(0, 120)


@given(budgets, decodes, divisible)
def test_divisible_prefills_fill_what_decodes_leave_and_no_more(budget, num_decodes, items):
    grants = plan_prefills(budget, num_decodes, items)
    left = max(0, budget - num_decodes)
    assert sum(grant.num_tokens for grant in grants) == min(left, sum(need.num_tokens for need in items))
    assert [grant.key for grant in grants] == [need.key for need in items[: len(grants)]]
    # All but the last run whole: nobody is cut while another behind gets tokens.
    assert all(g.num_tokens == n.num_tokens for g, n in zip(grants[:-1], items, strict=False))
    assert all(g.num_tokens > 0 for g in grants)


@given(budgets, decodes, needs)
def test_the_budget_bounds_all_but_what_would_run_beside_nothing(budget, num_decodes, items):
    grants = plan_prefills(budget, num_decodes, items)
    size = {need.key: need for need in items}
    if num_decodes >= budget:
        assert grants == ()  # decodes are never displaced
    total = num_decodes + sum(grant.num_tokens for grant in grants)
    if total > budget and grants:
        assert num_decodes == 0 and len(grants) == 1 and not size[grants[0].key].divisible
    assert [grant.key for grant in grants] == [need.key for need in items[: len(grants)]]
    assert all(g.num_tokens == size[g.key].num_tokens for g in grants if not size[g.key].divisible)


@given(budgets, decodes, needs, st.integers(0, 12))
def test_the_first_without_room_ends_the_plan(budget, num_decodes, items, num_with_room):
    room = {need.key for need in items[:num_with_room]}
    grants = plan_prefills(budget, num_decodes, items, lambda need: need.key in room)
    assert {grant.key for grant in grants} <= room
    unhindered = plan_prefills(budget, num_decodes, items)
    assert grants == unhindered[: len(grants)]
    assert len(grants) == min(len(unhindered), num_with_room)


@given(budgets, decodes, needs)
def test_asking_twice_gives_the_same_plan(budget, num_decodes, items):
    before = list(items)
    assert plan_prefills(budget, num_decodes, items) == plan_prefills(budget, num_decodes, items)
    assert items == before


@given(budgets, decodes)
def test_of_an_endless_queue_only_what_the_budget_admits_is_looked_at(budget, num_decodes):
    looked = 0

    def endless():
        nonlocal looked
        while True:
            looked += 1
            yield PrefillNeed(looked, 1)

    grants = plan_prefills(budget, num_decodes, endless())
    assert looked == len(grants) == max(0, budget - num_decodes)


@given(budgets, needs)
def test_a_lone_head_is_never_starved(budget, items):
    if items:
        assert plan_prefills(budget, 0, items)[0].key == items[0].key
