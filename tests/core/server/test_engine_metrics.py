"""Engines' figures in /metrics, and what /health says of a lost engine."""

from __future__ import annotations

import httpx

from genserve.core.errors import ExecutorLost
from tests.core.server.conftest import API_KEY


def scrape(served) -> dict[str, float]:
    text = httpx.get(served.server.url + "/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("genserve_engine_")]
    return {name: float(value) for name, value in lines}


def test_stats_are_scraped_fresh(serve_engine):
    served = serve_engine()
    assert scrape(served)['genserve_engine_submitted{model="tiny"}'] == 0
    served.client.completions.create(model="tiny", prompt="hi", max_tokens=2)
    found = scrape(served)
    assert found['genserve_engine_submitted{model="tiny"}'] == 1
    assert found['genserve_engine_up{model="tiny"}'] == 1


def test_counters_are_counters(serve_engine):
    served = serve_engine()

    async def stats() -> dict[str, float]:
        return {"num_steps": 7, "num_free_pages": 3}

    served.engine.stats = stats
    assert scrape(served) == {
        'genserve_engine_steps_total{model="tiny"}': 7,
        'genserve_engine_free_pages{model="tiny"}': 3,
        'genserve_engine_up{model="tiny"}': 1,
    }


def test_a_lost_engine_is_down_and_unhealthy(serve_engine):
    served = serve_engine(api_keys=[API_KEY])
    assert httpx.get(served.server.url + "/health").status_code == 200
    served.engine.lost = ExecutorLost("the engine's process is gone")
    answer = httpx.get(served.server.url + "/health")
    assert answer.status_code == 503
    assert answer.json() == {"status": "engine lost", "models": {"tiny": "the engine's process is gone"}}
    assert served.post("/v1/completions", {"model": "tiny", "prompt": "hi"})[0] == 503
    metrics = httpx.get(served.server.url + "/metrics", headers={"authorization": f"Bearer {API_KEY}"})
    assert 'genserve_engine_up{model="tiny"} 0.0' in metrics.text
