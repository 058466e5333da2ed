"""How long a `Run` takes and what it yields, when nothing really runs.

A front end gives the simulator one of each for its own operations.
"""

from __future__ import annotations

from typing import Any, Protocol

from genserve.core.control import Run


class CostModel(Protocol):
    """Prices a run. Must be a pure function of the run."""

    def price_s(self, run: Run) -> float:
        """Seconds on the run's lane; more than zero."""
        ...


class OutcomeModel(Protocol):
    """Invents a run's result. Called once a run, in the order the runs finish on their lane."""

    def outcome(self, run: Run) -> Any: ...
