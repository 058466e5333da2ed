"""Passes: pure functions from graph to graph, one file each. A new pass is a file here and its name below.

A pass keeps what the workflow computes; what it may change instead (a cache is approximate, two halves of guidance
are rounded apart) its file says. Owns their list and order; `compiler` runs them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from genserve.core.errors import ConfigError
from genserve.t2i.graph import Graph

# In the order in which they are run. Each is `genserve.t2i.passes.<name>.apply(graph, **options)`.
PASSES = (
    "fold_constants",
    "common_subexpressions",
    "approximate_cache",
    "cfg_split",
    "step_cache",
    "lora",
    "dead_nodes",
)
# What every workflow gets; the others change results, or pay only on some clusters.
DEFAULT = ("fold_constants", "common_subexpressions", "lora", "dead_nodes")

Pass = Callable[..., Graph]


def find_pass(name: str) -> Pass:
    """The pass of that name. Raises `ConfigError`."""
    if name not in PASSES:
        raise ConfigError(f"no pass {name!r}; there are: {', '.join(PASSES)}")
    found: Any = importlib.import_module(f"genserve.t2i.passes.{name}")
    return found.apply  # type: ignore[no-any-return]


def name_of(each: str | Pass) -> str:
    """What a pass is called: its file, of one that is a function too."""
    if isinstance(each, str):
        return each
    function = each.func if isinstance(each, functools.partial) else each
    return function.__module__.rpartition(".")[2] if function.__name__ == "apply" else function.__name__


def with_default(further: Sequence[str | Pass]) -> tuple[str | Pass, ...]:
    """`further` passes among those that every workflow gets, in the order of `PASSES`; unknown functions before "lora".

    Raises `ConfigError` for a name that is none.
    """
    chosen: dict[str, str | Pass] = dict.fromkeys(DEFAULT, "")
    for each in further:
        if isinstance(each, str):
            find_pass(each)
        chosen[name_of(each)] = each
    foreign = [name for name in chosen if name not in PASSES]
    order = [name for known in PASSES for name in ([*foreign, known] if known == "lora" else [known])]
    return tuple(chosen[name] or name for name in order if name in chosen)
