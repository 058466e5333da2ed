"""Tiny checkpoints of every family, each built once in a run, when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


class TinyFolders:
    """`tiny("sd3")` is a checkpoint's folder; `tiny.controlnet("sd3")` and `tiny.lora("sd3", seed=1)` are of it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str) -> str:
        from genserve.t2i.models.tiny import build_tiny

        return self._once(family, lambda folder: build_tiny(family, folder))

    def controlnet(self, family: str, seed: int = 0) -> str:
        from genserve.t2i.models.tiny import build_tiny_controlnet

        name = f"{family}-controlnet-{seed}"
        return self._once(name, lambda folder: build_tiny_controlnet(family, folder, seed))

    def lora(
        self,
        family: str,
        seed: int = 0,
        rank: int = 4,
        alpha: int | None = None,
        text_encoders: bool = False,
    ) -> str:
        from genserve.t2i.models.tiny import build_tiny_lora

        name = f"{family}-lora-{seed}-{rank}-{alpha}-{text_encoders}"
        return self._once(
            name, lambda folder: build_tiny_lora(family, folder, seed, rank, alpha, text_encoders)
        )

    def _once(self, name: str, build: Callable[[Path], object]) -> str:
        folder = self._root / name
        if not folder.exists():
            build(folder)
        return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFolders:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return TinyFolders(tmp_path_factory.mktemp("tiny"))
