"""A checkpoint folder: its `config.json` and its safetensors, read as they are asked for.

Every complaint is a `ConfigError` that names the key, tensor or file. Runs no code of the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from genserve.core.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_MOST_NAMES = 5


class Checkpoint:
    """Config keys and tensors of one folder; remembers which tensors were taken.

    `config` is `config.json`, `generation` is `generation_config.json` or empty. Tensors come in the
    dtype that is stored, on the CPU, and are the caller's.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.config = self._json("config.json")
        generation = folder / "generation_config.json"
        self.generation = self._json(generation.name) if generation.is_file() else {}
        self._files = self._find_tensors()
        self._open: dict[str, Any] = {}
        self._taken: set[str] = set()

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.name}: {message}")

    # Config

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; a null counts as absent."""
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.get(key, default)
        if value is None:
            raise self.error(f"config.json has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(
                f"config.json: {key} must be a whole number of at least {minimum}, not {value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self.error(f"config.json: {key} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"config.json: {key} must be true or false, not {value!r}")
        return value

    def only(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a value that is none of `allowed`; an absent key is `default`, or fine if that is None."""
        value = self.get(key, default)
        if value is not None and value not in allowed:
            raise self.error(
                f"{key} {value!r} is not supported, only {' or '.join(repr(each) for each in allowed)}"
            )

    def rope_theta(self, default: float = 10000.0) -> float:
        """Base of the rotary angles, in either spelling; scaled variants are refused."""
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.get(key, {})
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise self.error(f"{key} of type {kind!r} is not supported")
        parameters = self.get("rope_parameters", {})
        return (
            float(parameters["rope_theta"])
            if "rope_theta" in parameters
            else self.number("rope_theta", default)
        )

    # Tensors

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of that name, which must have that shape."""
        file = self._files.get(name)
        if file is None:
            raise self.error(f"the checkpoint has no tensor {name!r}")
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, "pt")
            tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self.error(f"cannot read {name!r} from {file}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise self.error(
                f"tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(shape)}"
            )
        if not tensor.is_floating_point() or tensor.dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            raise self.error(
                f"tensor {name!r} is {tensor.dtype}; float32, bfloat16 and float16 are supported"
            )
        self._taken.add(name)
        return tensor

    def ignore(self, name: str) -> None:
        """Let a tensor be there that the model does not need."""
        self._taken.add(name)

    def ignore_all(self) -> None:
        """Let the tensors be there for somebody else to read."""
        self._taken.update(self._files)

    def refuse_leftovers(self) -> None:
        """`ConfigError` if there are tensors that nobody took."""
        left = sorted(
            name
            for name in self._files
            if name not in self._taken and not name.endswith("rotary_emb.inv_freq")
        )
        if left:
            more = f" and {len(left) - _MOST_NAMES} more" if len(left) > _MOST_NAMES else ""
            names = ", ".join(repr(name) for name in left[:_MOST_NAMES])
            raise self.error(
                f"the checkpoint has tensors that this architecture has no place for: {names}{more}"
            )

    def _find_tensors(self) -> dict[str, str]:
        """File name of each tensor."""
        if (self.folder / _INDEX).is_file():
            files = self._json(_INDEX).get("weight_map")
            if not isinstance(files, dict):
                raise self.error(f"{_INDEX} has no weight_map")
            for file in sorted(set(files.values())):
                if not (self.folder / file).is_file():
                    raise self.error(f"{_INDEX} names {file}, which is not there")
            return files
        if not (self.folder / _WEIGHTS).is_file():
            raise self.error(f"no weights in {self.folder}: neither {_WEIGHTS} nor {_INDEX}")
        try:
            with safe_open(self.folder / _WEIGHTS, "pt") as weights:
                return dict.fromkeys(weights.keys(), _WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise self.error(f"cannot read {_WEIGHTS}: {error}") from error

    def _json(self, file: str) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / file).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.name}: cannot read {file}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self.name}: {file} is not a JSON object")
        return found
