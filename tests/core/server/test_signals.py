"""What signals do to a server process."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time

import pytest

_PROGRAM = """
from genserve.core.runtime.completion import Completer
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel
from genserve.core.server.run import bind, run, serve
from genserve.core.testing import Script, ScriptedEngine, byte_level_tokenizer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo

async def main():
    tokenizer = Tokenizer(byte_level_tokenizer())
    chunks = [[i] for i in tokenizer.encode("Hello world, hello")]
    info = EngineInfo("tiny", "ar", tokenizer.vocab_size, 256, 4096, 64, (2,))
    engine = ScriptedEngine(lambda r: Script(chunks, end=END, step_delay_s=0.05), info)
    model = ServedModel("tiny", 0, Completer(engine, tokenizer), tokenizer, info)
    gateway = Gateway([model])
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def close():
        await engine.aclose()
        print("closed", engine.num_live, flush=True)

    await serve(create_app(gateway), gateway, sock, drain_timeout_s=20,
                on_started=lambda: print(port, flush=True), on_stopped=close)

run(main)
"""


@pytest.fixture
def start():
    """`start(end)`: a server process mid-stream; gives the process and its response."""
    started = []

    def launch(end: str | None) -> tuple[subprocess.Popen, http.client.HTTPResponse]:
        program = _PROGRAM.replace("END", repr(end))
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=20)
        body = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 50}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        return process, response

    yield launch
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains_and_ends_with_zero(start, first):
    process, response = start("stop")
    process.send_signal(first)
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert process.wait(10) == 0
    assert process.stdout.read() == "closed 0\n"


def test_a_second_interrupt_ends_at_once(start):
    process, _ = start(None)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    assert time.monotonic() - begun < 2
