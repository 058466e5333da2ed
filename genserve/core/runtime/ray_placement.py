"""Where on a Ray cluster the workers of a deployment are: one placement group, one bundle a worker.

Owns reserving, the options with which an actor takes its bundle, and giving the group back with its last
member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_LOOKS_S = (0.01, 0.25)  # between two looks whether a group is placed, growing


@dataclass(frozen=True, slots=True)
class Placing:
    """What each worker takes (`bundle`: amounts by resource, "CPU", "GPU" or the cluster's own names), how
    workers lie to each other, and how long to wait for others to make room."""

    bundle: Mapping[str, float]
    strategy: Strategy = "PACK"
    timeout_s: float = 30.0


class Reservation:
    """A placement group that is given back when each of its members was."""

    def __init__(self, group: Any, placing: Placing, num_members: int) -> None:
        self._group = group
        self._placing = placing
        self._held = set(range(num_members))

    def options(self, index: int) -> dict[str, Any]:
        """Options of the actor in bundle `index`."""
        rest = dict(self._placing.bundle)
        return {
            "num_cpus": rest.pop("CPU", 0),
            "num_gpus": rest.pop("GPU", 0),
            "resources": rest or None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }

    def release(self, index: int) -> None:
        """Member `index` needs its bundle no more. Safe to call twice."""
        if self._held:
            self._held.discard(index)
            if not self._held:
                remove_placement_group(self._group)

    def release_all(self) -> None:
        for index in list(self._held):
            self.release(index)


async def reserve(num_workers: int, placing: Placing) -> Reservation:
    """Bundles for so many workers, within `placing.timeout_s`; else `ConfigError` says what there is."""
    bundles = [dict(placing.bundle)] * num_workers
    _check_cluster(num_workers, placing)
    group = placement_group(bundles, strategy=placing.strategy)
    try:
        async with asyncio.timeout(placing.timeout_s):
            pause_s, longest_s = _LOOKS_S
            while placement_group_table(group)["state"] != "CREATED":
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
    except TimeoutError:
        remove_placement_group(group)
        raise ConfigError(
            f"{_asked(num_workers, placing)}, which found no place within {placing.timeout_s:g} s; {_there_is()}"
        ) from None
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(group, placing, num_workers)


def _check_cluster(num_workers: int, placing: Placing) -> None:
    """Refuse at once what the cluster as a whole never has."""
    total = ray.cluster_resources()
    if any(total.get(name, 0.0) < num_workers * amount - 1e-6 for name, amount in placing.bundle.items()):
        raise ConfigError(f"{_asked(num_workers, placing)}, more than the cluster has; {_there_is()}")


def _asked(num_workers: int, placing: Placing) -> str:
    return f"{num_workers} worker(s) ask for {_text(placing.bundle)} each ({placing.strategy})"


def _there_is() -> str:
    free = ray.available_resources()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shown = "; ".join(_text({name: node.get(name, 0.0) for name in ("CPU", "GPU")}) for node in nodes)
    free_text = _text({name: free.get(name, 0.0) for name in ("CPU", "GPU")})
    return f"there is: {shown} on {len(nodes)} node(s), of which free: {free_text}"


def _text(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def num_gpus() -> float:
    """GPUs of the cluster."""
    return float(ray.cluster_resources().get("GPU", 0.0))
