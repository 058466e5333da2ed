"""KV on its way between engines: what one keeps for another to fetch, and what it fetches itself.

Owns the runs of the engine's link lane and the accounts of staged KV (Sangam §4.2); must not know
steps or budgets. The link copies beside the device's steps: into pages leased for the request before,
which no step reads until the copy has ended.
"""

from __future__ import annotations

from genserve.core.control import Run
from genserve.core.kv.blocks import KvPages, PageLease
from genserve.dllm.engine_request import EngineRequest
from genserve.dllm.limits import EngineLimits
from genserve.dllm.step import FETCH, RELEASE, FetchArgs, Handover, ReleaseArgs

# A copy that broke off is begun anew; after so many the block's prefill runs again instead.
MAX_FETCHES = 3


class Exchange:
    """The link of one engine. `take_runs` returns what is to be performed."""

    def __init__(self, lane: str, limits: EngineLimits) -> None:
        self.lane = lane
        self._limits = limits
        self.staging = KvPages(limits.staging_pages, limits.page_tokens, prefix_cache=False)
        self._staged: dict[str, tuple[PageLease | None, Handover]] = {}
        self._releasing: dict[int, PageLease | None] = {}
        self._fetching: dict[int, EngineRequest] = {}
        self._runs: list[Run] = []
        self._run_id = 0
        self.num_handed_over = 0
        self.num_fetched = 0
        self.num_failed_fetches = 0

    # -- for others ------------------------------------------------------------------------------

    def num_pages(self, request: EngineRequest) -> int:
        """Staging that handing the request over takes."""
        if not request.assign.hand_over:
            return 0
        return self._limits.staged_pages_for(len(request.canvas), request.params)

    def reserve(self, request: EngineRequest) -> bool:
        num_pages = self.num_pages(request)
        if num_pages == 0:
            return True
        lease = self.staging.open()
        if not lease.grow_to(num_pages * self._limits.page_tokens):
            lease.release()
            return False
        request.staging = lease
        return True

    def keep(self, request: EngineRequest, handover: Handover) -> None:
        """The request leaves with `handover`; its staging stays until it is let go."""
        self._staged[request.request_id] = (request.staging, handover)
        request.staging = None
        self.num_handed_over += 1

    def discard(self, request: EngineRequest, handover: Handover | None) -> None:
        """Nobody will fetch what the pass left behind."""
        lease, request.staging = request.staging, None
        self._release(request.request_id, lease, handover)

    def let_go(self, request_id: str) -> bool:
        """Give up what is kept for others under this id; False if nothing is."""
        lease, handover = self._staged.pop(request_id, (None, None))
        if handover is None:
            return False
        self._release(request_id, lease, handover)
        return True

    def _release(self, request_id: str, lease: PageLease | None, handover: Handover | None) -> None:
        if handover is None or not handover.parts:
            if lease is not None:
                lease.release()
            return
        self._releasing[self._run(RELEASE, ReleaseArgs(request_id, handover.parts))] = lease

    # -- from others -----------------------------------------------------------------------------

    def fetch(self, request: EngineRequest) -> bool:
        """Begin to copy a request's KV into its leased pages; False if there is none to copy."""
        handed, lease = request.assign.handed, request.lease
        assert handed is not None and lease is not None
        handover = handed.handover
        if not handover.parts and not handover.num_pages:
            return False
        request.num_fetches += 1
        args = FetchArgs(request.request_id, tuple(lease.pages[: handover.num_pages]), handover.parts)
        self._fetching[self._run(FETCH, args)] = request
        return True

    def ended(self, run_id: int) -> EngineRequest | None:
        """A run of the link is over, one way or another: the request whose KV it fetched, if it did."""
        if run_id in self._releasing:
            lease = self._releasing.pop(run_id)
            if lease is not None:
                lease.release()
            return None
        return self._fetching.pop(run_id)

    # -- runs ------------------------------------------------------------------------------------

    def _run(self, op: str, args: FetchArgs | ReleaseArgs) -> int:
        self._run_id += 1
        self._runs.append(Run(self.lane, self._run_id, op, args))
        return self._run_id

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs

    def stats(self) -> dict[str, float]:
        return {
            "num_staged": len(self._staged),
            "num_staged_pages": self.staging.num_used,
            "num_fetching": len(self._fetching),
            "num_handed_over": self.num_handed_over,
            "num_fetched": self.num_fetched,
            "num_failed_fetches": self.num_failed_fetches,
        }
