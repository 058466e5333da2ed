"""Disaggregated serving that survives: one worker prefills, two decode, and both are killed half-way.

    python examples/dllm_workers.py

The embedded model, each worker a process (a Ray actor). The answer that was under way goes on
from the start of its block, on whoever is left, and is the one that an undisturbed run gives.
"""

from __future__ import annotations

import os
import signal
import time

import httpx
from openai import OpenAI
from rich.console import Console
from server_process import served

WORKERS = ("num_workers=3", "num_prefill_workers=1", "overflow_tokens=never", "kv_pool=32MiB")
QUESTION = "Tell me a short story about a brave fox named Mia who finds a lamp in the forest."
ASKED = {"model": "tiny-llada", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 128}
SLOWLY = {"unmasking": "quota", "steps": 128}  # one position a pass


def main() -> None:
    console = Console()
    settings = [word for setting in WORKERS for word in ("--set", f"models.0.{setting}")]
    with served(console, "dllm", "--executor", "ray", *settings) as url:
        client = OpenAI(base_url=url + "/v1", api_key="none")
        whole = client.chat.completions.create(**ASKED, extra_body=SLOWLY).choices[0].message.content
        text = ""
        began_s = None
        for chunk in client.chat.completions.create(**ASKED, stream=True, extra_body=SLOWLY):
            piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
            if piece and began_s is None:
                workers = httpx.get(url + "/v1/workers").json()["data"]
                victims = [worker for worker in workers if worker["role"] == "colocated"]
                for worker in victims:
                    console.print(f"killing {worker['name']} (process {worker['pid']})", style="red")
                    os.kill(worker["pid"], signal.SIGKILL)
                began_s = time.monotonic()
            text += piece
        assert began_s is not None, "the answer has no text"
        console.print(text.strip(), style="green")
        console.print(f"That answer ended {time.monotonic() - began_s:.1f} s after the kills.")
        console.print("As undisturbed." if text == whole else "NOT as undisturbed.", style="bold")
        for worker in httpx.get(url + "/v1/workers").json()["data"]:
            console.print(f"{worker['name']}: {worker['role']}, {worker['state']}")


if __name__ == "__main__":
    main()
