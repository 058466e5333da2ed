"""The models that the package carries, measured on held-out items through the engines themselves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import genserve
from genserve import AsyncLLM

FOLDER = Path(genserve.__file__).parent / "builtin" / "tiny-llada"
ITEMS = json.loads((FOLDER / "held_out.json").read_text())
MAX_TOKENS = 96


async def _answer(llm: AsyncLLM, question: str, **options) -> tuple[str, int, int]:
    """Text, useful tokens (the stop token is none) and passes of one answer."""
    text, num_tokens, last_pass = "", 0, -1
    async for delta in llm.stream_chat(
        [{"role": "user", "content": question}], max_tokens=MAX_TOKENS, **options
    ):
        text += delta.text
        num_tokens += len(delta.token_ids)
        last_pass = max((last_pass, *(event.step for event in delta.unmasked)))
    return text, num_tokens - 1, last_pass + 1


@pytest.fixture(scope="module")
def scores() -> dict[str, tuple[float, float]]:
    """Exact matches and useful tokens a forward, by cache, at the threshold of 0.9."""

    async def main():
        found = {}
        async with await AsyncLLM.start("tiny-llada") as llm:
            for cache in ("none", "dual"):
                answers = await asyncio.gather(
                    *(
                        _answer(
                            llm,
                            item["question"],
                            include_unmasking=True,
                            options={"cache": cache, "threshold": 0.9},
                        )
                        for item in ITEMS
                    )
                )
                exact = sum(text == item["answer"] for (text, _, _), item in zip(answers, ITEMS, strict=True))
                tokens, passes = (sum(column) for column in list(zip(*answers, strict=True))[1:])
                found[cache] = exact / len(ITEMS), tokens / passes
        return found

    return asyncio.run(main())


def test_held_out_answers_are_right(scores):
    assert len(ITEMS) >= 100
    assert scores["none"][0] >= 0.90


def test_the_dual_cache_is_within_two_points(scores):
    assert scores["dual"][0] >= scores["none"][0] - 0.02


def test_a_forward_gives_four_useful_tokens(scores):
    assert scores["none"][1] >= 4.0
    assert scores["dual"][1] >= 4.0


def test_the_causal_twin_answers_too():
    async def main():
        async with await AsyncLLM.start("tiny-llama") as llm:
            facts = [item for item in ITEMS if item["task"] == "capital"]
            answers = await asyncio.gather(
                *(
                    llm.chat([{"role": "user", "content": item["question"]}], max_tokens=64, temperature=0)
                    for item in facts
                )
            )
            return [answer.text == item["answer"] for answer, item in zip(answers, facts, strict=True)]

    right = asyncio.run(main())
    assert sum(right) >= 0.9 * len(right)
