"""Workflows in files: a Python file that makes one, or JSON. Knows no runtime."""

from __future__ import annotations

from pathlib import Path

from genserve.core.errors import ConfigError
from genserve.t2i.python_file import names_of
from genserve.t2i.workflow import Workflow


def load_workflow(path: str | Path, name: str | None = None) -> Workflow:
    """The workflow called `name` that the file defines; its only one if no name is given.

    A Python file is executed. It defines those workflows that are values of its global names. Raises `ConfigError`,
    for what the file itself raises too.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no file {path}")
    if path.suffix == ".json":
        found = [Workflow.from_json(path.read_text())]
    elif path.suffix == ".py":
        values = names_of(path).values()
        found = list({id(value): value for value in values if isinstance(value, Workflow)}.values())
    else:
        raise ConfigError(f"{path} is neither a Python file nor JSON")
    if not found:
        raise ConfigError(f"{path} has no workflow among its global names")
    names = ", ".join(workflow.name for workflow in found)
    chosen = [workflow for workflow in found if name in (None, workflow.name)]
    if not chosen:
        raise ConfigError(f"{path} has no workflow {name!r}; there are: {names}")
    if len(chosen) > 1:
        raise ConfigError(f"{path} has several workflows, name one: {names}")
    return chosen[0]
