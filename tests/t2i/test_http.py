"""A real image model behind HTTP, beside a language model: tiny random checkpoints, real sockets."""

from __future__ import annotations

import base64
import io
import json
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from PIL import Image

from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.core.server.pictures import receipt_text
from genserve.families import start_configured
from genserve.server_config import server_config
from genserve.t2i.models.language import LanguageModel
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows import sd3

SIZE = "64x64"


def retold(sd3_folder: str) -> Workflow:
    """A language model writes the prompt of an image model."""
    paint = sd3(sd3_folder)
    with Workflow("retold") as wf:
        prompt = wf.add_input("prompt", str)
        seed = wf.add_input("seed", int)
        write = LanguageModel(
            model_path="tiny-llama", max_tokens=12, options={"kv_pool": "4MiB", "num_threads": 1}
        )
        text = write(prompt)
        wf.add_output(paint(prompt=text, seed=seed, num_steps=2, height=64, width=64), "image")
        wf.add_output(text, "text")
    return wf


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """`genserve serve` as its configuration says, on a thread."""
    workflow = tmp_path_factory.mktemp("workflows") / "retold.json"
    workflow.write_text(retold(tiny("sd3")).to_json())
    config = server_config(
        models=[f"pictures={tiny('sd3')}", "tiny-llama"],
        model_options={"kv_pool": "4MiB", "num_threads": 1},
        overrides=[
            f"models.0.controlnets={{edges: {tiny.controlnet('sd3')}}}",
            f"models.0.loras={{style: {tiny.lora('sd3')}}}",
            f"models.0.workflows=[{workflow}]",
        ],
    )
    assert [model.family for model in config.models] == ["t2i", "ar"]
    parts = SimpleNamespace()

    async def build() -> Parts:
        pictures, text = [await start_configured(model.family, model) for model in config.models]
        parts.gateway, parts.client = Gateway([pictures, text]), pictures.client

        async def close() -> None:
            await pictures.client.aclose()
            await text.completer.engine.aclose()

        return Parts(create_app(parts.gateway), parts.gateway, close)

    with ServerInThread(build) as server:
        parts.server = server
        parts.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        parts.http = httpx.Client(base_url=server.url, timeout=60)
        yield parts


def opened(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2])))


def idle(made, timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        stats = made.server.call(made.client.stats())
        if made.gateway.num_inflight_requests == 0 and not stats["num_streams"]:
            return True
        time.sleep(0.01)
    return False


def generate(made, **options):
    extra = {"steps": 2, **options.pop("extra_body", {})}
    return made.openai.images.generate(
        model="pictures", prompt="a cat", size=SIZE, extra_body=extra, **options
    )


def test_a_picture_and_its_receipt(made):
    answer = generate(made, n=2, extra_body={"seed": 5, "guidance_scale": 4.0})
    pictures = [opened(entry.b64_json) for entry in answer.data]
    assert [picture.size for picture in pictures] == [(64, 64)] * 2
    assert [entry.seed for entry in answer.data] == answer.receipt["seeds"] == [5, 6]
    assert pictures[0].tobytes() != pictures[1].tobytes()
    again = generate(made, extra_body={"seed": 6, "guidance_scale": 4.0})
    assert opened(again.data[0].b64_json).tobytes() == pictures[1].tobytes()
    text = receipt_text(base64.b64decode(answer.data[1].b64_json))
    assert json.loads(text) == {**answer.receipt, "image": 1}


def test_previews_edits_masks_and_control(made):
    events = list(generate(made, stream=True, partial_images=2, extra_body={"steps": 30}))
    kinds = [event.type.rpartition(".")[2] for event in events]
    assert kinds[-1] == "completed" and set(kinds[:-1]) == {"partial_image"} and len(kinds) <= 3
    assert all(opened(event.b64_json).size == (64, 64) for event in events)

    out = io.BytesIO()
    Image.new("RGB", (64, 64), "blue").save(out, "PNG")
    mask = io.BytesIO()
    Image.new("L", (64, 64), 255).save(mask, "PNG")
    extra = {"steps": 4, "strength": 0.5, "seed": 1}
    changed = made.openai.images.edit(image=out.getvalue(), prompt="a cat", extra_body=extra)
    assert changed.receipt["workflow"] == "pictures-image"
    painted = made.openai.images.edit(
        image=out.getvalue(), mask=mask.getvalue(), prompt="a cat", extra_body=extra
    )
    assert painted.receipt["workflow"] == "pictures-inpaint"
    control = {
        "control_image": base64.b64encode(out.getvalue()).decode(),
        "seed": 1,
        "conditioning_scale": 0.5,
    }
    controlled = generate(made, extra_body=control)
    assert controlled.receipt["workflow"] == "pictures-edges"
    plain = generate(made, extra_body={"seed": 1})
    assert opened(controlled.data[0].b64_json).tobytes() != opened(plain.data[0].b64_json).tobytes()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"size": "60x64"}, "size"),
        ({"steps": 5000}, "steps"),
        ({"scheduler": {"name": "nothing"}}, "scheduler.name"),
        ({"loras": [{"name": "nothing"}]}, "loras[0].name"),
    ],
)
def test_what_the_model_cannot_make_is_refused(made, body, field):
    answer = made.http.post("/v1/images/generations", json={"prompt": "x", "size": SIZE, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_adapters_are_named_and_scaled(made):
    def picture(*loras) -> bytes:
        answer = generate(made, extra_body={"seed": 1, "loras": list(loras)})
        return opened(answer.data[0].b64_json).tobytes()

    plain, whole, half = picture(), picture({"name": "style"}), picture({"name": "style", "scale": 0.5})
    assert len({plain, whole, half}) == 3
    assert picture() == plain and picture({"name": "style"}) == whole


def test_warnings_say_what_has_no_effect(made):
    answer = generate(made, extra_body={"guidance_scale": 1.0, "negative_prompt": "dog"})
    assert any("negative_prompt has no effect" in warning for warning in answer.warnings)


def test_a_client_that_goes_stops_the_work(made):
    body = {"prompt": "x", "size": SIZE, "steps": 900}
    with pytest.raises(httpx.ReadTimeout):
        made.http.post("/v1/images/generations", json=body, timeout=0.5)
    assert idle(made)


def test_a_job_of_a_workflow(made):
    body = {"inputs": {"prompt": "x", "num_steps": 30, "height": 64, "width": 64}, "preview_every_steps": 1}
    job = made.http.post("/v1/workflows/pictures/invoke", json={**body, "background": True}).json()
    text = made.http.get(f"/v1/jobs/{job['id']}/events").text
    assert text.count("event: preview") >= 1 and text.count("event: done") == 1
    done = made.http.get(f"/v1/jobs/{job['id']}").json()
    assert opened(done["result"]["outputs"][0]["image"]).size == (64, 64)
    body["inputs"]["num_steps"] = 900
    job = made.http.post("/v1/workflows/pictures/invoke", json={**body, "background": True}).json()
    assert made.http.post(f"/v1/jobs/{job['id']}/cancel").json()["status"] == "cancelled"
    assert idle(made)


def test_a_language_model_feeds_an_image_workflow(made):
    body = {"inputs": {"prompt": "What is the capital of France?", "seed": 3}}
    answer = made.http.post("/v1/workflows/retold/invoke", json=body).json()
    (output,) = answer["outputs"]
    question = [{"role": "user", "content": body["inputs"]["prompt"]}]
    said = made.openai.chat.completions.create(
        model="tiny-llama", messages=question, max_tokens=12, temperature=0
    )
    assert output["text"] and output["text"] == said.choices[0].message.content.strip()
    direct = made.openai.images.generate(
        model="pictures", prompt=output["text"], size=SIZE, extra_body={"seed": 3, "steps": 2}
    )
    assert opened(output["image"]).tobytes() == opened(direct.data[0].b64_json).tobytes()


def test_the_language_model_beside_it_answers(made):
    question = [{"role": "user", "content": "hi"}]
    assert made.openai.chat.completions.create(model="tiny-llama", messages=question, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="makes images"):
        made.openai.chat.completions.create(model="pictures", messages=question)
    models = {model.id: model.family for model in made.openai.models.list()}
    assert models == {"tiny-llama": "ar", "pictures": "t2i"}
    metrics = made.http.get("/metrics").text
    assert 'genserve_http_images_total{model="pictures"}' in metrics
    assert 'genserve_engine_up{model="pictures"} 1.0' in metrics
