"""Serve the embedded model, stream a chat answer from it with the official client, stop the server.

Run by `make demo`. Everything is as a user would do it: a server process and an HTTP client.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from openai import OpenAI
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from server_process import served

QUESTION = "What is the capital of France? Explain in two sentences why people visit it."
MAX_TOKENS = 96

console = Console()


def chat(url: str) -> None:
    """Stream one answer and show how fast it came."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    progress = Progress(
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )
    task = progress.add_task("tokens", total=MAX_TOKENS, speed="")
    text, usage, first_s, start_s = Text(), None, None, time.monotonic()
    console.print(Text(f"\nyou     | {QUESTION}"))
    with Live(console=console, refresh_per_second=12) as live:
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        num_pieces = 0
        for chunk in stream:
            usage = chunk.usage or usage
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if not piece:
                continue
            first_s = first_s or time.monotonic()
            num_pieces += 1
            text.append(piece)
            speed = (num_pieces - 1) / max(time.monotonic() - first_s, 1e-9)
            progress.update(task, completed=num_pieces, speed=f"{speed:.1f}/s" if num_pieces > 1 else "")
            live.update(Group(Panel(text, title="smollm2"), progress))
        end_s = time.monotonic()
    if first_s is None or usage is None:
        sys.exit("the server sent no tokens")
    console.print()
    table = Table(title="One request, streamed", title_justify="left", show_header=False)
    table.add_row("prompt tokens", str(usage.prompt_tokens))
    table.add_row("output tokens", str(usage.completion_tokens))
    table.add_row("TTFT", f"{first_s - start_s:.3f} s")
    table.add_row("tokens/s after the first", f"{(usage.completion_tokens - 1) / (end_s - first_s):.1f}")
    table.add_row("end to end", f"{end_s - start_s:.2f} s")
    console.print(table)


def main() -> None:
    with served(console, "--model", "ar:smollm2") as url:
        chat(url)
    command = os.path.relpath(Path(sys.executable).with_name("genserve"))
    console.print(Text(f"\nA server of your own: {command} serve"), soft_wrap=True)


if __name__ == "__main__":
    main()
