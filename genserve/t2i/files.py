"""Workflows in files: a Python file that makes one, or JSON. Reads and runs files; knows no runtime."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from genserve.core.errors import ConfigError, GenserveError
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
    values = vars(_executed(path)).values()
    found = list({id(value): value for value in values if isinstance(value, Workflow)}.values())
    if not found:
        raise ConfigError(f"{path} has no workflow among its global names")
    return found


def _executed(path: Path) -> ModuleType:
    # Registered under a name of its own, so that its model classes can be found again.
    name = f"_{path.stem}_file"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except GenserveError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{path.name}:{error.lineno}: SyntaxError: {error.msg}") from error
    except Exception as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        where = ":".join([path.name, *map(str, lines[-1:])])
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
