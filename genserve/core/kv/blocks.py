"""Page accounting and the prefix cache: which KV page belongs to whom. No torch, no storage.

Owns page ids, reference counts and the prefix index; must not know what a page holds. Storage is
`core.kv.pool`. Every page is at any time either used (some lease holds it) or free, and a free
page may still be cached (its content is known and may be reused until it is taken):
`num_used + num_free == num_pages`, after every call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

PAGE_TOKENS = 16

_ROOT = 0


class PrefixMatch(NamedTuple):
    """Cached pages that hold a prefix; `num_free_pages` of them are held by nobody now."""

    pages: tuple[int, ...]
    node: int
    num_free_pages: int


NO_MATCH = PrefixMatch((), _ROOT, 0)


class PageLease:
    """The pages of one sequence, in order; returned exactly once by `release`.

    `pages[i]` holds the KV of tokens `[i * page_tokens, (i + 1) * page_tokens)`. The first
    `num_cached_tokens` tokens came out of the prefix cache and need no computing.
    """

    __slots__ = ("_closed", "_node", "_num_indexed", "_owner", "num_cached_tokens", "pages")

    def __init__(self, owner: KvPages, pages: list[int], node: int) -> None:
        self._owner = owner
        self._node = node
        self._num_indexed = len(pages)
        self._closed = False
        self.pages = pages
        self.num_cached_tokens = len(pages) * owner.page_tokens

    def grow_to(self, num_tokens: int) -> bool:
        """Hold pages for `num_tokens` tokens. False, and nothing changed, if too few are free."""
        missing = -(-num_tokens // self._owner.page_tokens) - len(self.pages)
        if missing <= 0:
            return True
        taken = self._owner._take(missing)
        if taken is None:
            return False
        self.pages.extend(taken)
        return True

    def index(self, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Offer the full pages among the first `num_computed_tokens` to the prefix cache.

        `token_ids` is the sequence so far; its first `num_computed_tokens` have KV in `pages`.
        """
        page_tokens = self._owner.page_tokens
        while (self._num_indexed + 1) * page_tokens <= num_computed_tokens:
            start = self._num_indexed * page_tokens
            content = tuple(token_ids[start : start + page_tokens])
            self._node = self._owner._index_page(self._node, content, self.pages[self._num_indexed])
            self._num_indexed += 1

    def release(self) -> None:
        """Give all pages back. Calling again does nothing: every path may call it."""
        if not self._closed:
            self._closed = True
            self._owner._give_back(self.pages)
            self._owner._num_leases -= 1
            self.pages = []

    def __enter__(self) -> PageLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class KvPages:
    """The accounts of one pool of `num_pages` pages, `page_tokens` tokens each.

    With `prefix_cache`, full pages are indexed by (index node of the page before, the page's token
    ids). The key holds the tokens themselves, so equal hashes of different tokens never match.
    """

    def __init__(self, num_pages: int, page_tokens: int = PAGE_TOKENS, prefix_cache: bool = True) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.prefix_cache = prefix_cache
        self.num_evictions = 0
        self._num_leases = 0
        self._num_references = [0] * num_pages
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._node_of_key: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of_page: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._next_node = _ROOT + 1
        self._roots: dict[Hashable, int] = {None: _ROOT}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached_free)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def num_leases(self) -> int:
        return self._num_leases

    def match(
        self, token_ids: Sequence[int], unit_tokens: int | None = None, salt: Hashable = None
    ) -> PrefixMatch:
        """The longest cached prefix of `token_ids`, in whole pages. Takes nothing.

        At least the last token is left to compute, since its logits are wanted. With `unit_tokens`, a
        multiple of the page, only whole units match. Prefixes of different `salt` never match each other:
        it names what else the KV of a token depends on.
        """
        if salt not in self._roots:
            self._roots[salt] = self._next_node
            self._next_node += 1
        nodes = [self._roots[salt]]
        pages: list[int] = []
        if self._node_of_key:
            page_tokens = self.page_tokens
            for start in range(0, len(token_ids) - page_tokens, page_tokens):
                hit = self._node_of_key.get((nodes[-1], tuple(token_ids[start : start + page_tokens])))
                if hit is None:
                    break
                nodes.append(hit[0])
                pages.append(hit[1])
            if unit_tokens is not None:
                whole = len(pages) - len(pages) % (unit_tokens // page_tokens)
                del pages[whole:], nodes[whole + 1 :]
        references = self._num_references
        return PrefixMatch(tuple(pages), nodes[-1], sum(1 for page in pages if references[page] == 0))

    def num_free_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free pages that a lease of `num_tokens` tokens starting from `match` would take."""
        return -(-num_tokens // self.page_tokens) - len(match.pages) + match.num_free_pages

    def open(self, match: PrefixMatch = NO_MATCH) -> PageLease:
        """Begin a lease that holds the pages of `match`, which must come from an unchanged cache."""
        for page in match.pages:
            if self._num_references[page] == 0:
                del self._cached_free[page]
            self._num_references[page] += 1
        self._num_leases += 1
        return PageLease(self, list(match.pages), match.node)

    def _take(self, count: int) -> list[int] | None:
        if count > self.num_free:
            return None
        num_blank = max(0, len(self._blank) - count)
        taken = self._blank[num_blank:][::-1]
        del self._blank[num_blank:]
        while len(taken) < count:
            page, _ = self._cached_free.popitem(last=False)
            del self._node_of_key[self._key_of_page.pop(page)]
            self.num_evictions += 1
            taken.append(page)
        references = self._num_references
        for page in taken:
            references[page] = 1
        return taken

    def _index_page(self, parent: int, content: tuple[int, ...], page: int) -> int:
        if not self.prefix_cache:
            return _ROOT
        known = self._node_of_key.get((parent, content))
        if known is not None:
            return known[0]
        node = self._next_node
        self._next_node += 1
        self._node_of_key[parent, content] = (node, page)
        self._key_of_page[page] = (parent, content)
        return node

    def _give_back(self, pages: list[int]) -> None:
        # Last page first, so that eviction (oldest first) shortens prefixes from their end.
        references = self._num_references
        if not self._key_of_page:
            # Nothing is cached, so nothing is shared.
            for page in pages:
                references[page] = 0
            self._blank.extend(reversed(pages))
            return
        for page in reversed(pages):
            references[page] -= 1
            if references[page] == 0:
                if page in self._key_of_page:
                    self._cached_free[page] = None
                else:
                    self._blank.append(page)
