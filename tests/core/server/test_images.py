"""Images, workflows and jobs over real sockets, with the official client, in front of a client that paints."""

from __future__ import annotations

import base64
import io
import json
import time
import zlib
from types import SimpleNamespace

import httpx
import openai
import pytest
from openai.types import ImagesResponse
from PIL import Image

from genserve.core.errors import ConfigError, ExecutorLost
from genserve.core.runtime.completion import Completer
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.core.server.jobs import JobLimits
from genserve.core.server.pictures import MAX_PIXELS, decode, encode, receipt_text

from .conftest import API_KEY, TOKENIZER, make_engine
from .painter import Painter, served_painter


@pytest.fixture(scope="module")
def start():
    """`start(painter, gateway options..., **create_app arguments)`: a painter and a language model, served."""
    running = []

    def begin(painter: Painter | None = None, *, gateway=None, drain_timeout_s=5.0, **options):
        made = SimpleNamespace(painter=painter or Painter())

        async def build() -> Parts:
            engine = make_engine().engine
            text = ServedModel("tiny", 1, Completer(engine, TOKENIZER), TOKENIZER, engine.info)
            made.gateway = Gateway([served_painter(made.painter), text], **(gateway or {}))
            return Parts(create_app(made.gateway, **options), made.gateway, engine.aclose)

        server = ServerInThread(build, drain_timeout_s=drain_timeout_s)
        server.__enter__()
        running.append(server)
        made.server, made.url = server, server.url
        made.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0, timeout=20)
        headers = {"authorization": f"Bearer {API_KEY}"}
        made.http = httpx.Client(base_url=server.url, timeout=20, headers=headers)
        return made

    yield begin
    for server in running:
        server.__exit__()


@pytest.fixture(scope="module")
def fast(start):
    return start()


@pytest.fixture
def slow(start):
    return start(Painter(step_s=0.02))


def picture(size=(32, 32), colour="blue", form="PNG", mode="RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, colour).save(out, form)
    return out.getvalue()


def opened(text: str) -> Image.Image:
    return decode(base64.b64decode(text.rpartition(",")[2]), "answer")


def settled(made, timeout_s=5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        idle = made.gateway.num_inflight_requests == 0 and made.gateway.num_inflight_sequences("painter") == 0
        if idle and not made.painter.live:
            return True
        time.sleep(0.005)
    return False


def test_the_official_client_gets_pictures_that_its_types_know(fast):
    answer = fast.openai.images.generate(
        model="painter",
        prompt="a red circle",
        n=2,
        size="64x32",
        quality="auto",
        background="opaque",
        moderation="low",
        user="somebody",
        extra_body={
            "seed": 7,
            "steps": 3,
            "guidance_scale": 1.0,
            "negative_prompt": "blue",
            "loras": [{"name": "outline", "scale": 0.5}],
            "scheduler": {"shift": 3},
        },
    )
    assert ImagesResponse.model_validate(answer.model_dump(), strict=True).size == "64x32"
    assert [image.seed for image in answer.data] == [7, 8]
    assert answer.warnings == ["negative_prompt has no effect"] and answer.receipt["steps"] == 3
    pictures = [opened(image.b64_json) for image in answer.data]
    assert [image.size for image in pictures] == [(64, 32)] * 2
    assert pictures[0].tobytes() != pictures[1].tobytes()
    request = fast.painter.requests[-1]
    assert (request.num_images, request.loras[0].name, request.loras[0].scale) == (2, "outline", 0.5)
    assert dict(request.inputs) == {
        "prompt": "a red circle",
        "seed": 7,
        "num_steps": 3,
        "guidance_scale": 1.0,
        "negative_prompt": "blue",
        "scheduler": {"shift": 3},
        "width": 64,
        "height": 32,
    }
    data = base64.b64decode(answer.data[1].b64_json)
    assert json.loads(receipt_text(data)) == {**answer.receipt, "image": 1}


def test_image_i_equals_a_request_of_its_own_and_a_drawn_seed_is_told(fast):
    first = fast.openai.images.generate(prompt="a fox", n=3)
    seeds = [image.seed for image in first.data]
    assert seeds == [seeds[0], seeds[0] + 1, seeds[0] + 2]
    again = fast.openai.images.generate(prompt="a fox", extra_body={"seed": seeds[2]})
    assert opened(again.data[0].b64_json).tobytes() == opened(first.data[2].b64_json).tobytes()
    assert fast.openai.images.generate(prompt="a fox").data[0].seed != seeds[0]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_every_format_carries_the_receipt(fast, form):
    quality = {} if form == "png" else {"output_compression": 40}
    answer = fast.openai.images.generate(prompt="Größe 👋🏽", output_format=form, **quality)
    data = base64.b64decode(answer.data[0].b64_json)
    assert Image.open(io.BytesIO(data)).format == form.upper() and answer.output_format == form
    assert json.loads(receipt_text(data)) == {**answer.receipt, "image": 0}


def test_partial_images_come_before_the_image_and_decode(fast):
    for asked, steps, expected in [(0, 4, []), (1, 4, [2]), (3, 8, [2, 4, 6]), (3, 2, [1]), (2, 7, [3, 6])]:
        stream = fast.openai.images.generate(
            prompt="a fox", stream=True, partial_images=asked, extra_body={"num_steps": steps, "seed": 1}
        )
        events = list(stream)
        assert [event.type for event in events] == [
            *["image_generation.partial_image"] * len(expected),
            "image_generation.completed",
        ]
        assert [event.step for event in events[:-1]] == expected
        assert [event.partial_image_index for event in events[:-1]] == list(range(len(expected)))
        assert all(opened(event.b64_json).size == (32, 32) for event in events)
        assert events[-1].usage.total_tokens == 0 and events[-1].seed == 1
    whole = fast.openai.images.generate(prompt="a fox", extra_body={"num_steps": 7, "seed": 1})
    assert opened(whole.data[0].b64_json).tobytes() == opened(events[-1].b64_json).tobytes()


def test_streamed_images_of_one_request_are_told_apart(fast):
    events = list(fast.openai.images.generate(prompt="a fox", n=2, stream=True, partial_images=1))
    assert [(event.type.rpartition(".")[2], event.image_index) for event in events] == [
        ("partial_image", 0),
        ("partial_image", 1),
        ("completed", 0),
        ("completed", 1),
    ]


def test_edits_with_and_without_a_mask(fast):
    image = picture((48, 32))
    answer = fast.openai.images.edit(
        image=("in.png", image), prompt="a fox", n=2, extra_body={"seed": 3, "strength": 0.25}
    )
    assert [opened(entry.b64_json).size for entry in answer.data] == [(48, 32)] * 2
    request = fast.painter.requests[-1]
    assert request.workflow == "paint-edit" and request.inputs["strength"] == 0.25
    assert (request.inputs["width"], request.inputs["height"]) == (48, 32)

    hole = Image.new("RGBA", (48, 32), (0, 0, 0, 255))
    hole.paste((0, 0, 0, 0), (0, 0, 24, 32))
    out = io.BytesIO()
    hole.save(out, "PNG")
    white = Image.new("L", (48, 32), 0)
    white.paste(255, (0, 0, 24, 32))
    plain = io.BytesIO()
    white.save(plain, "PNG")
    for mask in (out.getvalue(), plain.getvalue()):
        answer = fast.openai.images.edit(
            image=image, mask=("mask.png", mask), prompt="a fox", size="48x32", extra_body={"seed": 3}
        )
        made = opened(answer.data[0].b64_json)
        assert fast.painter.requests[-1].workflow == "paint-inpaint"
        assert made.getpixel((40, 5)) == (0, 0, 255) != made.getpixel((4, 5))

    events = list(fast.openai.images.edit(image=image, prompt="a fox", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]


def test_forms_say_what_json_says(fast):
    fast.openai.images.edit(
        image=[("in.png", picture())],
        prompt="007",
        extra_body={
            "seed": 3,
            "steps": 2,
            "loras": [{"name": "outline", "scale": 0.5}, {"name": "dots", "scale": 2}],
        },
    )
    request = fast.painter.requests[-1]
    assert [(lora.name, lora.scale) for lora in request.loras] == [("outline", 0.5), ("dots", 2)]
    assert request.inputs["prompt"] == "007" and request.inputs["num_steps"] == 2
    form = {"prompt": "x", "loras": json.dumps([{"name": "dots"}, {"name": "outline", "scale": 1}])}
    answer = fast.http.post("/v1/images/edits", data=form, files={"image": picture()})
    assert answer.status_code == 200
    assert [lora.name for lora in fast.painter.requests[-1].loras] == ["dots", "outline"]


def test_a_control_image_chooses_its_workflow(fast):
    text = base64.b64encode(picture((40, 24), "black")).decode()
    extra = {"control_image": f"data:image/png;base64,{text}", "conditioning_scale": 0.5}
    answer = fast.openai.images.generate(prompt="x", extra_body=extra)
    assert fast.painter.requests[-1].workflow == "paint-control"
    assert answer.size == "40x24"


def test_a_workflow_may_be_named_as_the_model(fast):
    answer = fast.http.post("/v1/images/generations", json={"prompt": "x", "model": "paint-control"})
    error = answer.json()["error"]
    assert error["param"] == "control_image" and "required by paint-control" in error["message"]
    assert fast.openai.images.generate(model="paint", prompt="x").size == "32x32"


def bomb() -> bytes:
    """A small PNG that says it is 65535 x 65535."""
    data = bytearray(picture((1, 1)))
    data[16:24] = b"\x00\x00\xff\xff" * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({}, "prompt", "is required"),
        ({"prompt": 3}, "prompt", "string"),
        ({"prompt": "x", "n": 0}, "n", "greater"),
        ({"prompt": "x", "n": 11}, "n", "less"),
        ({"prompt": "x", "size": "33x32"}, "size", "multiple of 8"),
        ({"prompt": "x", "size": "256x32"}, "size", "128"),
        ({"prompt": "x", "size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"prompt": "x", "response_format": "url"}, "response_format", "b64_json"),
        ({"prompt": "x", "output_format": "gif"}, "output_format", "png"),
        ({"prompt": "x", "background": "transparent"}, "background", "opaque"),
        ({"prompt": "x", "quality": "high"}, "quality", "num_steps"),
        ({"prompt": "x", "style": "vivid"}, "style", "loras"),
        ({"prompt": "x", "partial_images": 1}, "partial_images", "stream"),
        ({"prompt": "x", "stream": True, "partial_images": 4}, "partial_images", "3"),
        ({"prompt": "x", "steps": 0}, "steps", "greater"),
        ({"prompt": "x", "steps": 2, "num_steps": 3}, "steps", "contradicts num_steps"),
        ({"prompt": "x", "num_steps": "3"}, "num_steps", "integer"),
        ({"prompt": "x", "seed": -1}, "seed", "greater"),
        ({"prompt": "x", "sed": 1}, "sed", "nothing that painter takes"),
        ({"prompt": "x", "strength": 0.5}, "strength", "nothing that painter takes"),
        ({"prompt": "x", "loras": [{"name": "/etc/passwd"}]}, "loras[0].name", "there is: outline, dots"),
        ({"prompt": "x", "loras": [{"name": "dots", "weight": 1}]}, "loras[0].weight", "not supported"),
        ({"prompt": "x", "control_image": "%%"}, "control_image", "base64"),
        ({"prompt": "x", "control_image": "http://example.org/a.png"}, "control_image", "nothing is fetched"),
        ({"prompt": "x", "control_image": "aGVsbG8="}, "control_image", "no PNG, JPEG or WebP"),
        (
            {"prompt": "x", "control_image": base64.b64encode(picture()[:-30]).decode()},
            "control_image",
            "broken",
        ),
        (
            {"prompt": "x", "control_image": base64.b64encode(bomb()).decode()},
            "control_image",
            str(MAX_PIXELS),
        ),
        ({"prompt": "x", "model": "tiny"}, "model", "language model"),
    ],
)
def test_mistakes_name_the_field_as_it_was_sent(fast, body, field, says):
    before = len(fast.painter.requests)
    answer = fast.http.post("/v1/images/generations", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and says in error["message"], error
    assert len(fast.painter.requests) == before


@pytest.mark.parametrize(
    ("form", "files", "field", "says"),
    [
        ({"prompt": "x"}, {"mask": picture()}, "image", "is required"),
        ({"prompt": "x"}, {"image": b""}, "image", "empty"),
        ({"prompt": "x"}, {"image": picture((33, 32))}, "image", "multiple of 8"),
        ({"prompt": "x", "size": "64x64"}, {"image": picture()}, "size", "32x32"),
        ({"prompt": "x"}, {"image": picture(), "mask": picture((16, 16))}, "mask", "as large as image"),
        ({"prompt": "x", "n": "two"}, {"image": picture()}, "n", "integer"),
        ({"prompt": "x", "strength": "much"}, {"image": picture()}, "strength", "number"),
        ({"prompt": "x"}, {"image": picture(), "markup": picture()}, "markup", "nothing"),
    ],
)
def test_mistakes_in_forms_too(fast, form, files, field, says):
    answer = fast.http.post("/v1/images/edits", data=form, files=files)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and says in error["message"], error


@pytest.mark.parametrize(
    "form",
    [
        {"prompt": "x", "prompt[a]": "1"},
        {"prompt": "x", "prompt[]": "1"},
        {"prompt": "x", "s[a]": "1", "s[a][b]": "1"},
    ],
)
def test_forms_that_contradict_themselves_are_refused(fast, form):
    answer = fast.http.post("/v1/images/edits", data=form, files={"image": picture()})
    assert answer.status_code == 400 and "two forms" in answer.json()["error"]["message"]


def test_two_pictures_an_animation_and_a_json_edit_are_refused(fast):
    files = [("image[]", picture()), ("image[]", picture())]
    answer = fast.http.post("/v1/images/edits", data={"prompt": "x"}, files=files)
    assert answer.json()["error"]["param"] == "image[1]"
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:])
    answer = fast.http.post("/v1/images/edits", data={"prompt": "x"}, files={"image": out.getvalue()})
    assert "animation" in answer.json()["error"]["message"]
    assert fast.http.post("/v1/images/edits", json={"prompt": "x"}).json()["error"]["param"] == "body"


def test_pictures_are_taken_upright_and_without_transparency():
    image = Image.new("RGB", (4, 2), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    assert decode(out.getvalue(), "x").size == (2, 4)
    assert receipt_text(encode(image, "png")) is None


def test_each_kind_of_model_refuses_the_others_routes_by_name(fast):
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"model": "painter", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        error = fast.http.post(path, json=body).json()["error"]
        assert error["param"] == "model" and "/v1/images/generations" in error["message"]
    answer = fast.http.post("/v1/images/generations", json={"model": "nobody", "prompt": "x"})
    assert answer.status_code == 404 and "tiny, painter" in answer.json()["error"]["message"]
    models = {model.id: model.family for model in fast.openai.models.list()}
    assert models == {"tiny": "ar", "painter": "t2i"}
    assert fast.openai.models.retrieve("painter").workflows[0] == "paint"


def test_two_models_with_one_workflow_are_refused():
    with pytest.raises(ConfigError, match="a and b both have a workflow 'paint'"):
        Gateway([served_painter(Painter(), "a"), served_painter(Painter(), "b")])


def test_a_client_that_goes_stops_the_work(slow):
    before = slow.http.get("/metrics").text
    assert 'genserve_http_disconnects_total{model="painter"}' not in before
    body = {"prompt": "x", "num_steps": 50}
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/v1/images/generations", json=body, timeout=0.3)
    assert settled(slow)
    stream = slow.openai.images.generate(prompt="x", stream=True, partial_images=3, extra_body={"steps": 50})
    next(iter(stream))
    stream.close()
    assert settled(slow)
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/v1/workflows/paint/invoke", json={"inputs": body}, timeout=0.3)
    assert settled(slow) and slow.painter.num_steps_done < 3 * 40
    metrics = slow.http.get("/metrics").text
    assert 'genserve_http_disconnects_total{model="painter"} 3.0' in metrics
    assert 'genserve_http_requests_total{model="painter",status="499"}' in metrics
    assert 'genserve_engine_up{model="painter"} 1.0' in metrics


def test_deadlines_failures_and_full_queues_have_their_status(slow):
    answer = slow.http.post("/v1/images/generations", json={"prompt": "x", "deadline_s": 0.03})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"
    slow.painter.failure = RuntimeError("out of paint")
    answer = slow.http.post("/v1/images/generations", json={"prompt": "x"})
    assert answer.status_code == 500 and "out of paint" in answer.json()["error"]["message"]
    slow.painter.failure = ExecutorLost("gone")
    with pytest.raises(openai.APIError, match="gone"):
        list(slow.openai.images.generate(prompt="x", stream=True))
    answer = slow.http.post(
        "/v1/workflows/paint/invoke", json={"inputs": {"prompt": "x"}, "n": 10, "background": True}
    )
    assert answer.status_code == 202
    answer = slow.http.post("/v1/images/generations", json={"prompt": "x", "n": 3})
    assert answer.status_code == 429 and "12 images" in answer.json()["error"]["message"]
    assert settled(slow)


def test_keys_are_asked_for_and_large_bodies_refused(start):
    made = start(api_keys=[API_KEY], max_image_body_bytes=1 << 16, max_body_bytes=100)
    for path in ("/v1/workflows", "/openapi.json", "/v1/jobs"):
        assert httpx.get(made.url + path).status_code == 401
        assert made.http.get(path).status_code == 200
    assert httpx.post(made.url + "/v1/images/generations", json={"prompt": "x"}).status_code == 401
    assert made.http.post("/v1/images/generations", json={"prompt": "x" * 1000}).status_code == 200
    files = {"image": b"x" * (1 << 17)}
    assert made.http.post("/v1/images/edits", data={"prompt": "x"}, files=files).status_code == 413


def test_workflows_describe_themselves_and_take_typed_inputs(fast):
    listed = fast.http.get("/v1/workflows").json()["data"]
    assert [entry["id"] for entry in listed] == ["paint", "paint-edit", "paint-inpaint", "paint-control"]
    shown = fast.http.get("/v1/workflows/paint").json()
    height = next(entry for entry in shown["inputs"] if entry["name"] == "height")
    assert height == {
        "name": "height",
        "type": "int",
        "required": False,
        "default": 32,
        "minimum": 16,
        "maximum": 128,
        "multiple_of": 8,
    }
    body = {"inputs": {"prompt": "two words", "seed": 5}, "n": 2, "output_format": "webp"}
    answer = fast.http.post("/v1/workflows/paint/invoke", json=body).json()
    assert answer["seeds"] == [5, 6] and [output["words"] for output in answer["outputs"]] == [2, 2]
    image = answer["outputs"][1]["image"]
    assert image.startswith("data:image/webp;base64,")
    body = {"inputs": {"prompt": "x", "image": image}}
    again = fast.http.post("/v1/workflows/paint-edit/invoke", json=body)
    assert again.status_code == 200 and fast.painter.requests[-1].inputs["image"].size == (32, 32)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "inputs"),
        ({"inputs": {}}, 400, "inputs.prompt"),
        ({"inputs": {"prompt": "x", "height": 33}}, 400, "inputs.height"),
        ({"inputs": {"prompt": "x", "guidance_scale": "5"}}, 400, "inputs.guidance_scale"),
        ({"inputs": {"prompt": "x", "image": "aGk="}}, 400, "inputs.image"),
        ({"inputs": {"prompt": "x"}, "size": "1x1"}, 400, "size"),
        ([], 400, "body"),
    ],
)
def test_wrong_inputs_are_named(fast, body, status, field):
    answer = fast.http.post("/v1/workflows/paint/invoke", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
    missing = fast.http.post("/v1/workflows/sculpt/invoke", json=body)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "workflow_not_found"


def test_the_openapi_document_has_each_workflows_body(fast):
    document = fast.http.get("/openapi.json").json()
    operation = document["paths"]["/v1/workflows/paint-edit/invoke"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    reference = schema["properties"]["inputs"]["$ref"]
    inputs = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert {"prompt", "image"} == set(inputs["required"])
    assert inputs["properties"]["image"]["contentEncoding"] == "base64"
    assert inputs["properties"]["height"]["multipleOf"] == 8
    references = set(json.dumps(document).split('"#/components/schemas/')[1:])
    names = {reference.partition('"')[0] for reference in references}
    assert names <= set(document["components"]["schemas"])
    forms = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    assert forms["multipart/form-data"]["schema"]["properties"]["mask"]["format"] == "binary"


def events_of(made, job_id: str, last: int | None = None) -> list[tuple[int, str, dict]]:
    headers = {} if last is None else {"last-event-id": str(last)}
    text = made.http.get(f"/v1/jobs/{job_id}/events", headers=headers).text
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def test_a_job_tells_its_events_and_keeps_its_result(slow):
    body = {"inputs": {"prompt": "x", "seed": 4}, "preview_every_steps": 1, "n": 2}
    answer = slow.http.post("/v1/workflows/paint/invoke", json={**body, "background": True})
    job = answer.json()
    assert answer.status_code == 202 and answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["status"], job["result"]) == ("running", None)
    events = events_of(slow, job["id"])
    kinds = [kind for _, kind, _ in events]
    assert kinds[0] == "node" and kinds.count("step") == 8 and kinds[-1] == "done"
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    previews = [data for _, kind, data in events if kind == "preview"]
    assert len(previews) == 6 and all(opened(data["picture"]).size == (32, 32) for data in previews)
    job = slow.http.get(f"/v1/jobs/{job['id']}").json()
    assert job["status"] == "succeeded" and job["progress"]["done"] == job["progress"]["total"]
    whole = slow.http.post("/v1/workflows/paint/invoke", json=body).json()
    assert job["result"]["outputs"] == whole["outputs"]

    replayed = events_of(slow, job["id"])
    assert len([kind for _, kind, _ in replayed if kind == "preview"]) == 2  # the last of each image
    rest = events_of(slow, job["id"], last=events[-3][0])
    assert rest == events[-2:]
    done = slow.http.get(f"/v1/jobs/{job['id']}/events", headers={"last-event-id": str(events[-1][0])})
    assert done.status_code == 204
    wrong = slow.http.get(f"/v1/jobs/{job['id']}/events", headers={"last-event-id": "x"})
    assert wrong.json()["error"]["param"] == "Last-Event-ID"


def test_jobs_are_cancelled_removed_and_forgotten(start):
    made = start(Painter(step_s=0.02), job_limits=JobLimits(max_jobs=2, max_age_s=0.5))
    headers = {"prefer": "respond-async"}
    body = {"inputs": {"prompt": "x", "num_steps": 50}}
    answer = made.http.post("/v1/workflows/paint/invoke", json=body, headers=headers)
    assert answer.headers["preference-applied"] == "respond-async"
    path = f"/v1/jobs/{answer.json()['id']}"
    assert made.http.get(path).json()["status"] == "running"
    assert made.http.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert settled(made) and made.painter.num_steps_done < 50
    assert made.http.post(f"{path}/cancel").json()["error"]["code"] == "cancelled"
    second = made.http.post("/v1/workflows/paint/invoke", json=body, headers=headers).json()
    assert len(made.http.get("/v1/jobs").json()["data"]) == 2
    assert made.http.delete(f"/v1/jobs/{second['id']}").json()["deleted"] is True
    assert settled(made)
    gone = made.http.get(f"/v1/jobs/{second['id']}")
    assert gone.status_code == 404 and "0.5 s, the last 2 of them" in gone.json()["error"]["message"]
    made.painter.failure = RuntimeError("out of paint")
    failed = made.http.post("/v1/workflows/paint/invoke", json=body, headers=headers).json()
    assert events_of(made, failed["id"])[-1][1:] == (
        "error",
        {
            "error": {
                "message": "out of paint",
                "type": "server_error",
                "param": None,
                "code": "execution_failed",
            }
        },
    )
    quick = {"inputs": {"prompt": "x", "num_steps": 1}}
    ids = []
    for _ in range(2):
        ids.append(made.http.post("/v1/workflows/paint/invoke", json=quick, headers=headers).json()["id"])
        events_of(made, ids[-1])
    assert [job["id"] for job in made.http.get("/v1/jobs").json()["data"]] == ids
    time.sleep(0.6)
    assert made.http.get("/v1/jobs").json()["data"] == []


def test_bytes_of_ended_jobs_are_bounded(start):
    made = start(job_limits=JobLimits(max_bytes=3000))
    for _ in range(8):
        body = {"inputs": {"prompt": "x"}, "background": True}
        job = made.http.post("/v1/workflows/paint/invoke", json=body).json()
        events_of(made, job["id"])
    kept = made.http.get("/v1/jobs").json()["data"]
    assert 0 < len(kept) < 8 and kept[-1]["id"] == job["id"]


def test_a_drain_waits_for_jobs_and_ends_those_that_take_too_long(start):
    body = {"inputs": {"prompt": "x", "num_steps": 10}, "background": True}
    made = start(Painter(step_s=0.02))
    made.http.post("/v1/workflows/paint/invoke", json=body)
    made.server.begin_stop()
    made.server.join()
    assert made.painter.num_steps_done == 10 and not made.painter.live
    made = start(Painter(step_s=0.1), drain_timeout_s=0.2)
    made.http.post("/v1/workflows/paint/invoke", json=body)
    made.server.begin_stop()
    made.server.join()
    assert made.painter.num_steps_done < 9 and not made.painter.live
