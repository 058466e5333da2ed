"""Passes: pure functions from graph to graph, one file each. A new pass is a file here and its name below.

A pass keeps what the workflow computes; what it may change instead (a cache is approximate, two halves of guidance
are rounded apart) its file says. Owns their list and order; `compiler` runs them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
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


def with_default(further: Mapping[str, Mapping[str, Any]]) -> tuple[str | Pass, ...]:
    """The passes that always run, and further ones with their options, in the order in which passes run.

    Raises `ConfigError` for what is no pass, or no option of it.
    """
    for name, options in further.items():
        known = list(inspect.signature(find_pass(name)).parameters)[1:]
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"pass {name} has no option {option!r}; there are: {', '.join(known) or 'none'}"
                )
    return tuple(
        functools.partial(find_pass(name), **further[name]) if name in further else name
        for name in PASSES
        if name in further or name in DEFAULT
    )


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
