"""A served diffusion model whose workers prefill or decode: answers, streams and metrics as with one worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from genserve.core.errors import ConfigError
from genserve.dllm.models.tiny import write_tiny
from genserve.dllm.models.tiny_canvas import write_tiny_diffusion_gemma
from genserve.families import start_model

from .served import Served

WAYS: list[dict[str, Any]] = [
    {"max_tokens": 24, "seed": 1, "block_length": 8},
    {"max_tokens": 20, "seed": 2, "block_length": 8, "cache": "prefix", "temperature": 1.0, "n": 2},
    {"max_tokens": 24, "seed": 3, "block_length": 8, "cache": "dkv", "unmasking": "quota", "steps": 9},
    {"max_tokens": 12, "seed": 4, "cache": "none", "cfg_scale": 0.5, "unmasking": "quota", "steps": 4},
    {"max_tokens": 24, "seed": 5, "block_length": 8, "suffix": "the end", "temperature": 0.7},
]


def texts(server: Served) -> list[list[str]]:
    """All at once, so that they share steps."""
    with ThreadPoolExecutor(len(WAYS)) as threads:
        answers = list(threads.map(lambda fields: server.complete(**fields), WAYS))
    return [[choice.text for choice in answer.choices] for answer in answers]


MODES = {
    "disaggregated": {"num_workers": 2, "num_prefill_workers": 1, "overflow_tokens": "never"},
    "hybrid": {"num_workers": 3, "num_prefill_workers": 1, "overflow_tokens": 64, "budget_tokens": 64},
}


def test_every_mode_gives_the_answers_of_one_worker(tmp_path):
    folder = str(write_tiny("llada", tmp_path / "llada"))
    with Served((folder, {})) as one:
        expected = texts(one)
        assert one.stats()["num_handed_over"] == 0
    for mode, options in MODES.items():
        with Served((folder, options)) as server:
            assert texts(server) == expected, mode
            assert texts(server) == expected, mode
            stats = server.stats()
            assert stats["num_handed_over"] >= 10 and stats["num_failed_fetches"] == 0
            assert 0 < stats["num_fetched"] <= stats["num_handed_over"]
            if mode == "disaggregated":
                assert stats["num_fetched"] < stats["num_handed_over"], "cache none moves no KV"
            assert server.settled()
            stats = server.stats()
            assert stats["num_staged"] == stats["num_staged_pages"] == stats["num_kept_pages"] == 0
            metrics = server.metrics()
            assert any("handed_over" in name and value >= 10 for name, value in metrics.items())


def test_block_causal_models_move_once(tmp_path):
    folder = str(write_tiny("sdar", tmp_path / "sdar"))
    fields = {"max_tokens": 24, "temperature": 0, "prompt": "Alpha " * 20}
    with Served((folder, {})) as one:
        expected = one.complete(**fields).choices[0].text
    with Served((folder, MODES["disaggregated"])) as server:
        assert server.complete(**fields).choices[0].text == expected
        assert server.complete(**fields).choices[0].text == expected
        stats = server.stats()
        assert stats["num_handed_over"] == stats["num_fetched"] == 2
        assert stats["num_cached_tokens"] > 0, "the prefill worker shares prefixes"


def test_what_cannot_work_is_refused_by_name(tmp_path):
    import asyncio

    folder = str(write_tiny("llada", tmp_path / "llada"))
    for options, message in (
        ({"num_workers": 2, "num_prefill_workers": 2}, "num_prefill_workers: 2 of 2 workers leave none"),
        ({"num_prefill_workers": 1}, "num_prefill_workers: 1 of 1 workers leave none"),
        ({"num_workers": 2, "num_prefill_workers": 1, "routing": "sticky"}, "routing: .*least_outstanding"),
        ({"num_workers": 2, "num_prefill_workers": 1, "overflow_tokens": 0}, "overflow_tokens"),
        (
            {"num_workers": 2, "num_prefill_workers": 1, "transfer_pool": "1KiB"},
            "transfer_pool: 1024 bytes hold",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(start_model(folder, {**options, "num_threads": 1}))
    canvas = str(write_tiny_diffusion_gemma(tmp_path / "canvas"))
    with pytest.raises(ConfigError, match=r"num_prefill_workers, transfer_pool: .* renoises whole canvases"):
        asyncio.run(start_model(canvas, {"num_workers": 2, "num_prefill_workers": 1, "num_threads": 1}))
