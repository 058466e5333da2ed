"""Workflows in files: Python files that make some, or JSON. Knows no runtime."""

from __future__ import annotations

from pathlib import Path

from genserve.core.errors import ConfigError
from genserve.t2i.python_file import names_of
from genserve.t2i.workflow import Workflow


def load_workflow(path: str | Path, name: str | None = None) -> Workflow:
    """The workflow called `name` that the file defines; its only one if no name is given.

    Raises `ConfigError`, for what the file itself raises too.
    """
    found = load_workflows(path)
    names = ", ".join(workflow.name for workflow in found)
    chosen = [workflow for workflow in found if name in (None, workflow.name)]
    if not chosen:
        raise ConfigError(f"{path} has no workflow {name!r}; there are: {names}")
    if len(chosen) > 1:
        raise ConfigError(f"{path} has several workflows, name one: {names}")
    return chosen[0]


def load_workflows(path: str | Path) -> list[Workflow]:
    """Every workflow that the file defines. Raises `ConfigError`, for what the file itself raises too.

    A Python file is executed. It defines those workflows that are values of its global names.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"no file {path}")
    if path.suffix == ".json":
        return [Workflow.from_json(path.read_text())]
    if path.suffix != ".py":
        raise ConfigError(f"{path} is neither a Python file nor JSON")
    found = list(
        {id(value): value for value in names_of(path).values() if isinstance(value, Workflow)}.values()
    )
    if not found:
        raise ConfigError(f"{path} has no workflow among its global names")
    return found
