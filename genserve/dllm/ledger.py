"""What the dispatcher knows of an engine without asking it: whom it holds, with which pages and tokens.

Owns the views that routing chooses by. Pages count until the engine says that they are free.
"""

from __future__ import annotations

from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import Role
from genserve.dllm.routing import EngineView
from genserve.dllm.tracked import TrackedRequest


class Held:
    """A request that an engine has not given back: its pages, and its prefill tokens until they ran."""

    __slots__ = ("is_kept", "num_pages", "num_staged_pages", "num_tokens", "order", "request")

    def __init__(
        self, request: TrackedRequest, num_pages: int, num_tokens: int, num_staged_pages: int = 0
    ) -> None:
        self.request: TrackedRequest | None = request
        self.is_kept = False
        self.order = request.order
        self.num_pages = num_pages
        self.num_staged_pages = num_staged_pages
        self.num_tokens = num_tokens


class EngineLedger:
    """The ledger of one engine.

    `leaving` says that nothing more is assigned to it: it is drained, to go or to take the role `becomes`.
    """

    __slots__ = (
        "alive",
        "becomes",
        "held",
        "leaving",
        "name",
        "num_kept",
        "num_pages",
        "num_staged_pages",
        "outstanding_tokens",
        "role",
        "unstarted",
    )

    def __init__(self, name: str, role: Role = "colocated") -> None:
        self.name = name
        self.role = role
        self.becomes: Role | None = None
        self.leaving = False
        self.forget_all()
        self.alive = True

    @property
    def is_open(self) -> bool:
        return self.alive and not self.leaving

    def forget_all(self) -> None:
        self.alive = False
        self.held: dict[str, Held] = {}
        self.unstarted: dict[str, Held] = {}
        self.num_kept = 0
        self.num_pages = 0
        self.num_staged_pages = 0
        self.outstanding_tokens = 0

    @property
    def num_seated(self) -> int:
        """Requests that have, or wait for, pages and a slot."""
        return len(self.held) - self.num_kept

    def take(self, key: str, held: Held) -> None:
        self.held[key] = self.unstarted[key] = held
        self.num_pages += held.num_pages
        self.num_staged_pages += held.num_staged_pages
        self.outstanding_tokens += held.num_tokens

    def started(self, key: str) -> None:
        held = self.unstarted.pop(key, None)
        if held is not None:
            self.outstanding_tokens -= held.num_tokens

    def keeps(self, key: str) -> None:
        """The request's KV is staged for another engine; its pages and slot are free."""
        held = self.held[key]
        held.is_kept = True
        self.num_kept += 1
        self.num_pages -= held.num_pages
        held.num_pages = 0

    def give_back(self, key: str) -> None:
        self.started(key)
        held = self.held.pop(key)
        self.num_kept -= held.is_kept
        self.num_pages -= held.num_pages
        self.num_staged_pages -= held.num_staged_pages

    def view(self, order: int, num_pages: int, limits: EngineLimits) -> EngineView:
        """For a request of `order`: whatever is younger and has not begun will wait behind it."""
        younger = [held for held in self.unstarted.values() if held.order > order]
        free_pages = limits.num_pages - self.num_pages + sum([held.num_pages for held in younger])
        free_slots = limits.max_running - self.num_seated + len(younger)
        return EngineView(
            self.is_open and free_pages >= num_pages and free_slots >= 1,
            self.is_open and free_pages >= 0 and free_slots >= 0,
            self.outstanding_tokens,
            self.num_seated,
        )

    def reserving_view(self, num_pages: int, limits: EngineLimits) -> EngineView:
        """For a request whose pages and slot are taken at once, whoever waits there."""
        has_room = limits.num_pages - self.num_pages >= num_pages and self.num_seated < limits.max_running
        return EngineView(self.is_open and has_room, False, self.outstanding_tokens, self.num_seated)

    def staging_view(self, num_staged_pages: int, limits: EngineLimits) -> EngineView:
        """For a request whose KV will be kept here until another engine has fetched it."""
        has_room = limits.staging_pages - self.num_staged_pages >= num_staged_pages
        return EngineView(self.is_open and has_room, False, self.outstanding_tokens, self.num_seated)
