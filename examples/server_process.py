"""A server in a process of its own, as the examples use one: started, waited for, stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

STOP_TIMEOUT_S = 30


@contextmanager
def served(console: Console, *arguments: str) -> Iterator[str]:
    """`genserve serve ARGUMENTS` on a free port; yields its URL once it is ready, and stops it at the end.

    What the server says on stdout is shown; its progress goes to stderr. Exits if it fails.
    """

    def tell(line: str) -> None:
        console.print(Text(f"server | {line.rstrip()}", style="dim"), soft_wrap=True)

    command = [sys.executable, "-m", "genserve", "serve", *arguments, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"Ready at (http://\S+);", line):
                tell(f"ready at {found[1]}")
                break
            tell(line)
        else:
            sys.exit(f"the server ended with status {server.wait()} before it was ready")
        yield found[1]
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        # Not `communicate`: it reads past the lines that the wait for "Ready" has already buffered.
        rest = server.stdout.read()
        server.wait(timeout=STOP_TIMEOUT_S)
    # What it said once it was ready are hints for a port that is closed by now.
    for line in rest.splitlines():
        if line.startswith("Stop"):
            tell(line)
    if server.returncode != 0:
        sys.exit(f"the server ended with status {server.returncode}")
