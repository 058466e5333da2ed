"""What a terminal shows while a model is fetched and loaded."""

from __future__ import annotations

from rich.console import Console

from genserve.cli_progress import LoadProgress
from genserve.core.models.fetch import FetchProgress


def test_bytes_are_shown_only_when_they_are_known():
    progress = LoadProgress()

    def shown() -> str:
        console = Console(width=100)
        with console.capture() as capture:
            console.print(progress._progress.get_renderable())
        return capture.get()

    progress.begin("m")
    assert "m: importing torch and transformers" in shown() and "bytes" not in shown()
    progress.on_progress(FetchProgress("m", "download", 1_000_000, 4_000_000))
    assert "m: downloading" in shown() and "1.0/4.0 MB" in shown()
    progress.on_progress(FetchProgress("m", "load"))
    assert "m: loading weights" in shown() and "bytes" not in shown() and "MB" not in shown()
