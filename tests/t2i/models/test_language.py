"""Language models as nodes of a workflow: in this process and behind HTTP, AR and diffusion."""

from __future__ import annotations

import pytest

from genserve import LLM
from genserve.core.errors import ConfigError
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.families import start_model
from genserve.t2i.models.language import LanguageModel
from genserve.t2i.reference import evaluate
from genserve.t2i.session import Session
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows import sd3

SMALL = {"kv_pool": "4MiB", "num_threads": 1}
QUESTION = "What is the capital of France?"


def rewritten(**params) -> str:
    with Workflow("rewrite") as wf:
        prompt = wf.add_input("prompt", str)
        wf.add_output(LanguageModel(**params)(prompt), "text")
    text = evaluate(wf.to_graph(), {"prompt": QUESTION})["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-llada"])
def test_the_text_is_what_the_library_says(model):
    params = {"model_path": model, "max_tokens": 24, "options": SMALL}
    with LLM(model, **SMALL) as llm:
        question = [{"role": "user", "content": QUESTION}]
        expected = llm.chat(question, max_tokens=24, temperature=0, seed=0).text.strip()
        plain = llm.generate(f"Q: {QUESTION}", max_tokens=8, temperature=0, seed=0).text.strip()
    assert expected and rewritten(**params) == rewritten(**params) == expected
    assert rewritten(**{**params, "instruction": "Q: ", "chat": False, "max_tokens": 8}) == plain


def test_a_rewritten_prompt_feeds_an_image(tiny):
    paint = sd3(tiny("sd3"))
    with Workflow("illustrate") as wf:
        idea, seed = wf.add_input("idea", str), wf.add_input("seed", int)
        text = LanguageModel(model_path="tiny-llama", max_tokens=8, options=SMALL)(idea)
        wf.add_output(text, "prompt")
        wf.add_output(paint(text, seed=seed, num_steps=1, height=32, width=32), "image")
    with Session(num_threads=1) as session:
        session.register(wf)
        session.register(paint)
        made = session.run("illustrate", idea=QUESTION, seed=3).outputs[0]
        plain = session.run("sd3", prompt=made["prompt"], seed=3, num_steps=1, height=32, width=32)
    assert made["prompt"] == rewritten(model_path="tiny-llama", max_tokens=8, options=SMALL)
    assert made["image"] == plain.outputs[0]["image"]


def test_the_same_model_behind_http_says_the_same():
    made = []

    async def build() -> Parts:
        served = await start_model("tiny-llama", SMALL)
        gateway = Gateway([served])
        made.append(gateway)
        return Parts(create_app(gateway), gateway, served.completer.engine.aclose)

    with ServerInThread(build) as server:
        remote = rewritten(base_url=f"{server.url}/v1", served_model="tiny-llama", max_tokens=24)
    assert remote == rewritten(model_path="tiny-llama", max_tokens=24, options=SMALL)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "either model_path or base_url"),
        ({"model_path": "a", "base_url": "b"}, "either"),
        ({"base_url": "b"}, "served_model"),
        ({"model_path": "a", "temperature": 1}, "no parameter 'temperature'"),
    ],
)
def test_wrong_parameters_are_named(params, says):
    with pytest.raises(ConfigError, match=says):
        LanguageModel(**params)
