"""A Python file run for what it defines, as `genserve serve` and `genserve t2i graph` read workflows."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from genserve.core.errors import CompileError, ConfigError


def names_of(path: Path) -> dict[str, Any]:
    """Run the file as a module of its stem's name, importable from then on, and return its names.

    Its own models are then importable by workers of this process. Raises `ConfigError`, with the line, for whatever
    the file raises.
    """
    name = path.stem
    if not name.isidentifier():
        raise ConfigError(f"{path}: a file's name must be a Python identifier")
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path.resolve()):
            return vars(known)
        raise ConfigError(f"{path}: there is already a module {name!r}; rename the file")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, CompileError):
            raise  # it tells its line
        raise ConfigError(
            f"{path}{_line(error, module.__file__)}: {type(error).__name__}: {error}"
        ) from error
    return vars(module)


def _line(error: Exception, file: str | None) -> str:
    """ ":12", the last line of the file on the way to the error."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f":{lines[-1]}" if lines else ""
