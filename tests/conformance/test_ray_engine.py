"""An engine inside an actor: order, aborts, deadlines, and what its death does to whoever waits on it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from genserve.core.errors import ExecutionFailed, ExecutorLost
from genserve.core.types import EngineInfo, SamplingParams, Submit, TokenOutput

RAY = pytest.param("ray", marks=pytest.mark.ray)


INFO = EngineInfo("scripted", "ar", 100, 64, 64, 8)


class SlowEngine:
    """An engine for an actor: counts up for each request, refuses id "bad", and can be made to die.

    Aborting "fatal" fails it as a whole, aborting "unabortable" raises.
    """

    info = INFO

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.log: list[str] = []
        self.failure = None
        self.deadline_left_s = 0.0

    def run_age_s(self):
        return 3600.0 if "stuck" in self.live else 0.0

    def submit(self, request):
        self.log.append(f"submit {request.request_id}")
        if self.failure is not None:
            raise self.failure
        if request.deadline_s is not None:
            self.deadline_left_s = request.deadline_s - asyncio.get_running_loop().time()
        if request.request_id == "bad":
            raise ExecutionFailed("the controller failed long ago")
        self.live.add(request.request_id)
        return self._count(request)

    async def _count(self, request):
        first = True
        for token_id in range(request.sampling.max_tokens):
            await asyncio.sleep(0.002)
            if request.request_id not in self.live:
                yield TokenOutput(request.request_id, finish_reason="abort")
                return
            yield TokenOutput(request.request_id, (token_id,), num_cached_tokens=int(first))
            first = False
        self.live.discard(request.request_id)
        yield TokenOutput(request.request_id, finish_reason="length")

    def abort(self, request_id):
        self.log.append(f"abort {request_id}")
        if request_id == "unabortable":
            raise RuntimeError("cannot abort this one")
        if request_id == "fatal":
            self.failure = ExecutionFailed("the engine's controller failed: KeyError: 'x'")
        self.live.discard(request_id)

    async def stats(self):
        return {
            "num_live": len(self.live),
            "num_messages": len(self.log),
            "deadline_left_s": self.deadline_left_s,
        }

    async def aclose(self):
        if "never closes" in self.live:
            await asyncio.sleep(3600)
        self.live.clear()


async def build_slow_engine():
    return SlowEngine()


def submit(request_id, max_tokens, prompt=(1,)):
    return Submit(request_id, tuple(prompt), SamplingParams(temperature=0, max_tokens=max_tokens))


class OtherClock(asyncio.SelectorEventLoop):
    """A loop whose clock began at another time than an actor's."""

    def time(self):
        return super().time() + 1e6


class Unreadable:
    """Can be sent, not received."""

    def __reduce__(self):
        return _cannot_read, ()


def _cannot_read():
    raise ImportError("no such module over there")


def with_ray_engine(body, loop_factory=None):
    from genserve.core.runtime.ray_executor import RayEngine

    async def main():
        engine = await RayEngine.start(build_slow_engine)
        try:
            async with asyncio.timeout(60):
                await body(engine)
        finally:
            async with asyncio.timeout(20):
                await engine.aclose()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def collect(stream):
    return [output async for output in stream]


@pytest.mark.ray
def test_an_engine_in_an_actor_streams_in_order_and_aborts(ray_session):
    async def body(engine):
        assert engine.info == INFO
        streams = [engine.submit(submit(f"r{i}", 20 + i)) for i in range(6)]
        endless = engine.submit(submit("endless", 10**6))
        for index, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
            assert [t for output in outputs for t in output.token_ids] == list(range(20 + index))
            assert [o.finish_reason for o in outputs] == [None] * (20 + index) + ["length"]
        engine.abort("endless")
        engine.abort("never there")
        assert (await collect(endless))[-1].finish_reason == "abort"
        stats = await engine.stats()
        assert stats["num_live"] == stats["num_streams"] == 0

    with_ray_engine(body)


@pytest.mark.ray
def test_a_submission_that_the_actor_refuses_ends_its_stream_alone(ray_session):
    async def body(engine):
        good, bad, later = (engine.submit(submit(name, 3)) for name in ("good", "bad", "later"))
        engine.abort("later")
        (refused,) = await collect(bad)
        assert refused.finish_reason == "error" and "failed long ago" in refused.error
        assert (await collect(good))[-1].finish_reason == "length"
        assert (await collect(later))[-1].finish_reason == "abort"

    with_ray_engine(body)


@pytest.mark.ray
def test_an_abort_never_overtakes_its_submission(ray_session):
    """A large batch travels another way than a small one, and arrives later."""

    async def body(engine):
        for turn in range(5):
            stream = engine.submit(submit(f"large{turn}", 10**6, range(200_000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.abort(f"large{turn}")
            assert (await asyncio.wait_for(collect(stream), 10))[-1].finish_reason == "abort"
        assert (await engine.stats())["num_live"] == 0

    with_ray_engine(body)


@pytest.mark.ray
def test_a_killed_engine_raises_on_every_stream_and_refuses_new_ones(ray_session):
    import ray

    async def body(engine):
        streams = [engine.submit(submit(f"r{i}", 10**6)) for i in range(4)]
        for stream in streams:
            await anext(stream)
        begun = time.monotonic()
        ray.kill(engine._actor.handle)
        for result in await asyncio.gather(*map(collect, streams), return_exceptions=True):
            assert isinstance(result, ExecutorLost)
        assert time.monotonic() - begun < 5
        with pytest.raises(ExecutorLost):
            engine.submit(submit("late", 1))
        engine.abort("r0")
        with pytest.raises(ExecutorLost):
            await engine.stats()

    with_ray_engine(body)


@pytest.mark.ray
def test_an_engine_that_fails_within_its_actor_says_so(ray_session):
    async def body(engine):
        assert engine.failure is None
        stream = engine.submit(submit("r", 10**6))
        await anext(stream)
        engine.abort("fatal")
        with pytest.raises(ExecutionFailed, match="controller failed: KeyError"):
            await collect(stream)
        assert isinstance(engine.failure, ExecutionFailed)
        with pytest.raises(ExecutionFailed, match="controller failed"):
            engine.submit(submit("late", 1))

    with_ray_engine(body)


@pytest.mark.ray
def test_an_idle_engine_that_fails_is_known_within_seconds(ray_session):
    async def body(engine):
        engine.abort("fatal")
        async with asyncio.timeout(5):
            while engine.failure is None:
                await asyncio.sleep(0.05)

    with_ray_engine(body)


@pytest.mark.ray
def test_an_abort_that_raises_fails_its_stream(ray_session):
    async def body(engine):
        stream, other = engine.submit(submit("unabortable", 10**6)), engine.submit(submit("other", 3))
        engine.abort("unabortable")
        last = (await asyncio.wait_for(collect(stream), 10))[-1]
        assert last.finish_reason == "error" and "cannot abort this one" in last.error
        assert (await collect(other))[-1].finish_reason == "length"

    with_ray_engine(body)


@pytest.mark.ray
@pytest.mark.parametrize("what", ["unsendable", "unreadable"])
def test_a_submission_that_cannot_cross_fails_its_stream_and_no_later_one(ray_session, what):
    async def body(engine):
        token = threading.Lock() if what == "unsendable" else Unreadable()
        lost = engine.submit(submit("lost", 3, (token,)))
        mate = engine.submit(submit("mate", 3)) if what == "unsendable" else None
        await asyncio.sleep(0.05)
        later = engine.submit(submit("later", 3))
        last = (await asyncio.wait_for(collect(lost), 10))[-1]
        assert last.finish_reason == "error" and last.error
        for stream in filter(None, (mate, later)):
            assert (await asyncio.wait_for(collect(stream), 10))[-1].finish_reason == "length"

    with_ray_engine(body)


@pytest.mark.ray
def test_a_deadline_is_counted_from_now_on_the_actors_own_clock(ray_session):
    async def body(engine):
        deadline_s = asyncio.get_running_loop().time() + 30
        request = Submit("r", (1,), SamplingParams(temperature=0, max_tokens=2), None, deadline_s)
        await collect(engine.submit(request))
        assert 25 < (await engine.stats())["deadline_left_s"] <= 31

    with_ray_engine(body, OtherClock)


@pytest.mark.ray
def test_an_engine_that_never_closes_is_killed(ray_session):
    async def body(engine):
        stream = engine.submit(submit("never closes", 10**6))
        await anext(stream)
        begun = time.monotonic()
        await engine.aclose(timeout_s=0.3)
        assert time.monotonic() - begun < 5
        with pytest.raises(ExecutorLost, match="closed"):
            await collect(stream)

    with_ray_engine(body)
