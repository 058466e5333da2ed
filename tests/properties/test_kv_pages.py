"""Page accounts and prefix cache, against a plain model of what every page holds."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from genserve.core.kv.blocks import KvPages

# Small pages of few distinct tokens: prefixes meet, diverge inside a page, and return.
PAGE_TOKENS = 3
NUM_PAGES = 12
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=4 * PAGE_TOKENS + 1)


class Held:
    """A lease with the tokens whose KV is in its pages, as an engine would keep them."""

    def __init__(self, lease, token_ids) -> None:
        self.lease = lease
        self.token_ids = list(token_ids)
        self.num_written = lease.num_cached_tokens
        self.closed = False


class PagesMachine(RuleBasedStateMachine):
    """`content[page]` is what was last written there: the page's whole prefix, so sharing is judged by it."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = KvPages(NUM_PAGES, PAGE_TOKENS)
        self.content: dict[int, tuple[int, ...]] = {}
        self.live: list[Held] = []
        self.max_evictions = 0

    @rule(target=held, token_ids=tokens)
    def open(self, token_ids):
        match = self.pages.match(token_ids)
        assert self.pages.match(token_ids) == match
        assert len(match.pages) * PAGE_TOKENS < len(token_ids)  # one token at least is left to compute
        for index, page in enumerate(match.pages):
            assert self.content[page] == tuple(token_ids[: (index + 1) * PAGE_TOKENS])
        needed = self.pages.num_free_needed(match, len(token_ids))
        free_before = self.pages.num_free
        lease = self.pages.open(match)
        assert lease.num_cached_tokens == len(match.pages) * PAGE_TOKENS
        fits = lease.grow_to(len(token_ids))
        assert fits == (needed <= free_before)
        if not fits:
            lease.release()
            assert self.pages.num_free == free_before
            return multiple()
        assert free_before - self.pages.num_free == needed
        mine = Held(lease, token_ids)
        self.live.append(mine)
        return mine

    @rule(mine=held, more=tokens)
    def grow(self, mine, more):
        if mine.closed:
            return
        before, free = list(mine.lease.pages), self.pages.num_free
        length = len(mine.token_ids) + len(more)
        missing = -(-length // PAGE_TOKENS) - len(before)
        grew = mine.lease.grow_to(length)
        assert grew == (missing <= free)
        if grew:
            mine.token_ids += more
            assert (
                mine.lease.pages[: len(before)] == before and len(mine.lease.pages) == len(before) + missing
            )
        else:
            assert (mine.lease.pages, self.pages.num_free) == (before, free)

    @rule(mine=held, data=st.data())
    def compute_and_index(self, mine, data):
        if mine.closed:
            return
        end = data.draw(st.integers(mine.num_written, len(mine.token_ids)))
        for position in range(mine.num_written, end):
            page = mine.lease.pages[position // PAGE_TOKENS]
            assert sum(page in other.lease.pages for other in self.live) == 1  # written by its owner alone
            self.content[page] = tuple(mine.token_ids[: position + 1])
        mine.num_written = end
        mine.lease.index(mine.token_ids, end)

    @rule(mine=consumes(held))
    def release(self, mine):
        mine.lease.release()
        if not mine.closed:
            self.live.remove(mine)
        mine.closed = True
        free = self.pages.num_free
        mine.lease.release()
        assert self.pages.num_free == free and mine.lease.pages == []

    @rule(mine=held)
    def release_but_keep_the_handle(self, mine):
        """Every path may release, and later ones do so again."""
        mine.lease.release()
        if not mine.closed:
            self.live.remove(mine)
        mine.closed = True

    @rule(token_ids=tokens)
    def a_held_prefix_is_found(self, token_ids):
        """What some live lease has indexed cannot have been evicted."""
        found = len(self.pages.match(token_ids).pages)
        for mine in self.live:
            shared = 0
            for a, b in zip(mine.token_ids[: mine.num_written], token_ids, strict=False):
                if a != b:
                    break
                shared += 1
            assert found >= min(shared, len(token_ids) - 1) // PAGE_TOKENS

    @invariant()
    def accounts_add_up(self):
        distinct = {page for mine in self.live for page in mine.lease.pages}
        assert self.pages.num_used == len(distinct)
        assert self.pages.num_used + self.pages.num_free == NUM_PAGES
        assert self.pages.num_leases == len(self.live)
        assert all(0 <= page < NUM_PAGES for page in distinct)

    @invariant()
    def a_page_in_two_leases_holds_the_same_prefix_for_both(self):
        for mine in self.live:
            assert len(set(mine.lease.pages)) == len(mine.lease.pages)
            for index in range(mine.num_written // PAGE_TOKENS):
                page = mine.lease.pages[index]
                assert self.content[page] == tuple(mine.token_ids[: (index + 1) * PAGE_TOKENS])

    def teardown(self):
        for mine in self.live:
            mine.lease.release()
        assert (self.pages.num_free, self.pages.num_leases) == (NUM_PAGES, 0)
        everything = self.pages.open()
        assert everything.grow_to(NUM_PAGES * PAGE_TOKENS) and not everything.grow_to(
            NUM_PAGES * PAGE_TOKENS + 1
        )
        assert sorted(everything.pages) == list(range(NUM_PAGES))
        everything.release()


PagesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPages = PagesMachine.TestCase


def test_eviction_takes_free_pages_only_oldest_first_and_prefixes_from_their_end():
    pages = KvPages(6, PAGE_TOKENS)
    first, second = [0] * 6 + [9], [1] * 6 + [9]
    for token_ids in (first, second):
        with pages.open(pages.match(token_ids)) as lease:
            assert lease.grow_to(6)
            lease.index(token_ids, 6)
    assert len(pages.match(first).pages) == len(pages.match(second).pages) == 2
    with pages.open(pages.match(second)) as kept, pages.open() as newcomer:
        assert newcomer.grow_to(3 * PAGE_TOKENS)  # two blank pages, and one of the first prompt's
        assert pages.num_evictions == 1
        assert len(pages.match(first).pages) == 1 and len(pages.match(second).pages) == 2
        assert newcomer.grow_to(4 * PAGE_TOKENS) and not newcomer.grow_to(5 * PAGE_TOKENS)
        assert len(kept.pages) == 2 and not set(kept.pages) & set(newcomer.pages)
    assert len(pages.match(second).pages) == 2


def test_whole_units_match_and_salts_do_not_mix():
    """A unit of three pages; what one salt indexed is unknown to another."""
    pages = KvPages(16, page_tokens=4)
    ids = list(range(24))
    lease = pages.open(pages.match(ids, 12, "a"))
    assert lease.grow_to(24)
    lease.index(ids, 20)
    assert len(pages.match(ids, salt="a").pages) == 5
    assert pages.match(ids, 12, "a").pages == tuple(lease.pages[:3])
    assert pages.match(ids[:12], 12, "a").pages == ()  # one token is left to compute
    assert pages.match(ids, 12, "b").pages == pages.match(ids).pages == ()
    with pages.open(pages.match(ids, 12, "a")) as second:
        assert second.grow_to(24) and second.num_cached_tokens == 12
        second.index(ids, 20)
    lease.release()
    assert pages.num_used == 0 and len(pages.match(ids, 12, "a").pages) == 3
