"""A grammar is compiled before its request reaches the engine: whoever generates does not wait for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from threading import Event, current_thread

import pytest

from genserve.ar.config import ArConfig
from genserve.ar.serve import EngineParts, build_parts, start_local
from genserve.core.models.grammar import GrammarCompiler
from genserve.core.models.tiny import make_tiny_folder
from genserve.core.types import Grammar, SamplingParams, Submit, TokenOutput

YES = Grammar("regex", "(yes){2}")


@pytest.fixture
def parts(tmp_path) -> EngineParts:
    folder = make_tiny_folder(tmp_path / "tiny")
    return build_parts(ArConfig(model=str(folder), kv_pool="2MiB", num_threads=1, max_running=4))


def submit(name: str, grammar: Grammar | None = None, after: str | None = None) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=grammar is None, grammar=grammar)
    return Submit(name, (5, 6, 7), sampling, after)


async def read(stream) -> list[TokenOutput]:
    return [output async for output in stream]


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_no_step_compiles(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    real = GrammarCompiler.compile

    def compile_(self: GrammarCompiler, grammar: Grammar):
        if grammar not in self._cache:
            threads.append(current_thread().name)
        return real(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_)

    async def scenario() -> None:
        engine = await start_local(parts)
        schema = Grammar("json_schema", json.dumps({"enum": [f"member {i}" for i in range(200)]}))
        streams = [engine.submit(submit("a", schema)), engine.submit(submit("b", schema, after="a"))]
        for stream in streams:
            assert (await read(stream))[-1].finish_reason in ("stop", "length")
        await engine.aclose()

    run(scenario())
    assert len(threads) == 1 and threads[0].startswith("prepare")


def test_others_run_while_a_grammar_is_prepared(parts: EngineParts) -> None:
    gate = Event()

    def prepare(request: Submit) -> None:
        assert gate.wait(20)

    async def scenario() -> None:
        engine = await start_local(replace(parts, prepare=prepare))
        constrained = engine.submit(submit("slow", YES))
        gone = engine.submit(submit("gone", YES))
        assert sum(len(o.token_ids) for o in await read(engine.submit(submit("plain")))) == 8
        engine.abort("gone")
        assert [output.finish_reason for output in await read(gone)] == ["abort"]
        assert (await engine.stats())["num_streams"] == 1
        gate.set()
        assert (await read(constrained))[-1].finish_reason in ("stop", "length")
        stats = await engine.stats()
        assert stats["num_streams"] == stats["num_sequences"] == 0
        await engine.aclose()

    run(scenario())


def test_what_cannot_be_prepared_fails_alone(parts: EngineParts) -> None:
    async def scenario() -> None:
        engine = await start_local(parts)
        bad = engine.submit(submit("bad", Grammar("regex", "(")))
        plain = engine.submit(submit("plain"))
        (output,) = await read(bad)
        assert output.finish_reason == "error" and "grammar" in (output.error or "")
        assert (await read(plain))[-1].finish_reason == "length"
        await engine.aclose()

    run(scenario())


def test_closing_ends_what_is_being_prepared(parts: EngineParts) -> None:
    gate = Event()

    async def scenario() -> None:
        engine = await start_local(replace(parts, prepare=lambda request: gate.wait(20)))
        stream = engine.submit(submit("slow", YES))
        await asyncio.sleep(0.01)
        await engine.aclose()
        assert [output.finish_reason for output in await read(stream)] == ["abort"]
        gate.set()

    run(scenario())
