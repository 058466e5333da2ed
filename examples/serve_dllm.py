"""Serve a diffusion language model, ask it with the official client, and watch its answers settle.

    python examples/serve_dllm.py [--model MODEL] [--pause SECONDS] [QUESTION ...]

Everything is as a user would do it: a server process and an HTTP client. The stream carries each token
with its place in the answer, as it is put there; on a terminal the answer is drawn anew at each pass, with
colours by confidence, elsewhere a line is printed for each pass.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from server_process import served

QUESTIONS = (
    "What is the capital of France?",
    "Sort these numbers: 31, 7, 24, 12.",
    "Tell me a short story about a brave fox named Mia who finds a lamp in the forest.",
)
MAX_TOKENS = 96
# Few positions a pass, so that one can watch them settle.
SLOWLY = {"unmasking": "margin", "steps": MAX_TOKENS // 4}
OPEN = "▒"

console = Console(highlight=False)


@dataclass
class Canvas:
    """What is known of an answer so far."""

    num_positions: int
    tokens: dict[int, str] = field(default_factory=dict)
    confidences: dict[int, float] = field(default_factory=dict)
    passes: set[int] = field(default_factory=set)
    new: set[int] = field(default_factory=set)

    def put(self, events: Iterable[dict[str, Any]]) -> None:
        """Tokens of one or more passes."""
        self.new = set()
        for event in events:
            position = event["position"]
            self.tokens[position] = event["token"]
            self.confidences[position] = event["confidence"]
            self.passes.add(event["step"])
            self.new.add(position)

    def drawn(self) -> Text:
        """Open places as blocks; what came last is bold; green is sure, red is not."""
        text = Text()
        end = next((p for p in sorted(self.tokens) if _is_end(self.tokens[p])), self.num_positions)
        for position in range(end):
            token = self.tokens.get(position)
            if token is None:
                text.append(OPEN, style="dim")
            else:
                bold = "bold " if position in self.new else ""
                text.append(token, style=bold + _colour(self.confidences[position]))
        return text


def _is_end(token: str) -> bool:
    return re.fullmatch(r"<\|.*\|>|</s>", token) is not None


def _colour(confidence: float) -> str:
    for least, colour in ((0.99, "green"), (0.9, "yellow"), (0.5, "dark_orange")):
        if confidence >= least:
            return colour
    return "red"


def ask(
    client: OpenAI, model: str, question: str, pause_s: float, options: dict[str, Any] | None = None
) -> tuple[str, Any, int]:
    """One answer, shown as it settles: its text, usage and passes."""
    how = "" if options is None else f"  {options}"
    console.print(Text.assemble(f"\nyou    | {question}", (how, "dim")))
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
        extra_body=options,
        # `include_unmasking` is this server's own; other clients simply do not ask for it.
        stream_options={"include_usage": True, "include_unmasking": True},  # type: ignore[typeddict-unknown-key]
    )
    canvas, text, usage = Canvas(MAX_TOKENS), "", None
    with _shown(model) as show:
        for chunk in stream:
            usage = chunk.usage or usage
            if not chunk.choices:
                continue
            text += chunk.choices[0].delta.content or ""
            events = getattr(chunk.choices[0], "unmasked", None)
            if events:
                canvas.put(events)
                show(canvas)
                time.sleep(pause_s)
        canvas.new = set()
        show(canvas)
    return text, usage, len(canvas.passes)


class _shown:
    """Draws a canvas in place on a terminal, and a line a pass elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._num_shown = 0

    def __enter__(self) -> Any:
        if self._live is not None:
            self._live.start()
        return self.show

    def show(self, canvas: Canvas) -> None:
        title = f"{self._title}, pass {len(canvas.passes)}"
        if self._live is not None:
            self._live.update(Panel(canvas.drawn(), title=title), refresh=True)
        elif canvas.new:
            console.print(Text(f"pass {len(canvas.passes):3} | ").append_text(canvas.drawn()), soft_wrap=True)

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()


def infill(client: OpenAI, model: str) -> None:
    """What a diffusion model can and others cannot: the middle of a text, from both of its sides."""
    before, after = "The capital of France is", ", a city in Europe."
    answer = client.completions.create(model=model, prompt=before, suffix=after, max_tokens=1)
    console.print(Text.assemble("\ninfill | ", before, (answer.choices[0].text, "bold green"), after))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default="tiny-llada")
    parser.add_argument("--pause", type=float, default=0.15, help="seconds that each pass stays in sight")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    with served(console, "dllm", "--model", arguments.model) as url:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            (model,) = [served.id for served in client.models.list()]
            table = Table(title="Answers, streamed", title_justify="left")
            for name in ("question", "tokens", "passes", "tokens a pass"):
                table.add_column(name, justify="left" if name == "question" else "right")
            asked = [(question, None) for question in arguments.questions]
            for question, options in (*asked, (arguments.questions[-1], SLOWLY)):
                _, usage, num_passes = ask(client, model, question, arguments.pause, options)
                num_tokens = usage.completion_tokens
                a_pass = f"{num_tokens / max(num_passes, 1):.1f}"
                table.add_row(question[:40], str(num_tokens), str(num_passes), a_pass)
            infill(client, model)
            console.print()
            console.print(table)


if __name__ == "__main__":
    main()
