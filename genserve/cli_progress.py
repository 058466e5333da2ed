"""Progress of fetching and loading a model, on stderr: a spinner on a terminal, a line a stage elsewhere.

A bar is shown while the bytes to come are known.
"""

from __future__ import annotations

from typing import Any

_STAGES = {
    "wait": "another process fetches it, waiting",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting (once)",
    "done": "fetched",
    "load": "loading weights",
}
_FIRST = "importing torch and transformers"


class LoadProgress:
    """Start it, `begin` a model, let `on_progress` follow its `FetchProgress`, stop it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = Console(stderr=True)
        text = (SpinnerColumn(), TextColumn("{task.description}"))
        self._without_bytes = (*text, TimeElapsedColumn())
        self._with_bytes = (*text, BarColumn(bar_width=24), DownloadColumn())
        self._progress = Progress(
            *self._without_bytes, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task: Any = None
        self._model = ""
        self._stage = ""

    def start(self) -> None:
        """Show it."""
        self._progress.start()

    def stop(self) -> None:
        """Take it away."""
        self._progress.stop()

    def __enter__(self) -> LoadProgress:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def begin(self, model: str) -> None:
        """A model begins to load."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._model, self._stage = model, ""
        self._task = self._progress.add_task(f"{model}: {_FIRST}", total=None)
        self._progress.columns = self._without_bytes
        self._say(_FIRST)

    def on_progress(self, progress: Any) -> None:
        """The model's next `FetchProgress`; from any thread."""
        text = _STAGES.get(progress.stage, progress.stage)
        self._progress.columns = self._with_bytes if progress.total_bytes else self._without_bytes
        self._progress.update(
            self._task,
            description=f"{self._model}: {text}",
            completed=progress.done_bytes,
            total=progress.total_bytes or None,
        )
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._say(text)

    def _say(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"{self._model}: {text}", highlight=False)
