"""Progress of fetching and loading a model, on stderr: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

from typing import Any

_STAGES = {
    "wait": "another process fetches it, waiting",
    "download": "downloading",
    "unpack": "unpacking",
    "convert": "converting (once)",
    "done": "loading",
}


class LoadProgress:
    """Start it, `begin` a model, let `on_progress` follow its `FetchProgress`, stop it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

        self._console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
        )
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
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
        self._task = self._progress.add_task(f"{model}: loading", total=None)
        self._say("loading")

    def on_progress(self, progress: Any) -> None:
        """The model's next `FetchProgress`; from any thread."""
        text = _STAGES.get(progress.stage, progress.stage)
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
