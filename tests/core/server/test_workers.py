"""Operators' routes and `genserve workers`, on a real server whose members run in this process."""

from __future__ import annotations

import json

import httpx
import pytest
from typer.testing import CliRunner

from genserve.cli import app as cli
from genserve.core.runtime.completion import Completer
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.core.testing import ScriptedEngine
from tests.core.runtime.nearby import engine_with

from .conftest import API_KEY, TOKENIZER, babble, engine_info


@pytest.fixture
def url():
    """A server of two models: "many" has members, "one" has none."""

    async def build() -> Parts:
        many, _ = await engine_with(["full", "half"], info=engine_info(model="many"))
        one = ScriptedEngine(babble, engine_info(model="one"))
        served = [
            ServedModel(
                engine.info.model, 0, Completer(engine, TOKENIZER), TOKENIZER, engine.info, membership=members
            )
            for engine, members in ((many, many.membership), (one, None))
        ]
        gateway = Gateway(served)

        async def close() -> None:
            await many.aclose()
            await one.aclose()

        return Parts(create_app(gateway, api_keys=[API_KEY]), gateway, close)

    with ServerInThread(build) as server:
        yield server.url


def ask(url: str, method: str, path: str, model: str | None = "many", **options) -> httpx.Response:
    headers = {"authorization": f"Bearer {API_KEY}"}
    params = {} if model is None else {"model": model}
    return httpx.request(method, url + path, params=params, headers=headers, **options)


def test_operators_list_add_change_and_drain(url):
    worker = {"object": "worker", "state": "running", "pid": 1}
    first = [{**worker, "name": "engine-0", "role": "full"}, {**worker, "name": "engine-1", "role": "half"}]
    assert ask(url, "GET", "/v1/workers").json() == {"object": "list", "data": first}
    added = ask(url, "POST", "/v1/workers", json={"role": "full"})
    assert (added.status_code, added.json()) == (200, {**worker, "name": "engine-2", "role": "full"})
    changed = ask(url, "PATCH", "/v1/workers/engine-0", json={"role": "half"})
    assert changed.json() == {**worker, "name": "engine-0", "role": "half"}
    gone = ask(url, "DELETE", "/v1/workers/engine-1")
    assert gone.json() == {"name": "engine-1", "object": "worker", "deleted": True}
    assert [w["name"] for w in ask(url, "GET", "/v1/workers").json()["data"]] == ["engine-0", "engine-2"]


@pytest.mark.parametrize(
    ("method", "path", "model", "body", "status", "param", "said"),
    [
        ("GET", "", None, None, 400, "model", "name one of the models: many, one"),
        ("GET", "", "none", None, 404, "model", "no model 'none'"),
        ("GET", "", "one", None, 400, "model", "cannot be changed while it serves"),
        ("POST", "", "many", {"role": "quarter"}, 400, "role", "must be one of full, half"),
        ("POST", "", "many", {}, 400, "role", "required"),
        ("POST", "", "many", {"role": "full", "gpu": 1}, 400, "gpu", "not permitted"),
        ("POST", "", "many", [1], 400, "body", "object"),
        ("PATCH", "/engine-0", "many", {"role": "half"}, 400, "role", "a full worker is needed"),
        ("PATCH", "/engine-7", "many", {"role": "half"}, 404, "name", "no worker 'engine-7'"),
        ("DELETE", "/engine-0", "many", None, 400, "name", "a full worker is needed"),
        ("DELETE", "/engine-7", "many", None, 404, "name", "there is: engine-0, engine-1"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(url, method, path, model, body, status, param, said):
    response = ask(url, method, "/v1/workers" + path, model, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param) and said in error["message"]


def test_the_routes_need_the_key(url):
    for method, path in (("GET", ""), ("POST", ""), ("PATCH", "/engine-0"), ("DELETE", "/engine-1")):
        assert httpx.request(method, f"{url}/v1/workers{path}").status_code == 401


def test_the_command_line_does_the_same(url):
    def run(*arguments: str, exit_code: int = 0) -> str:
        options = ["--url", url + "/v1", "--model", "many", "--api-key", API_KEY]
        result = CliRunner().invoke(cli, ["workers", *arguments, *options])
        assert result.exit_code == exit_code, result.output
        return result.output

    assert run("add", "half") == "engine-2 (half) serves\n"
    assert run("role", "engine-2", "full") == "engine-2 is full now\n"
    assert run("drain", "engine-0") == "engine-0 is gone\n"
    assert [worker["name"] for worker in json.loads(run("list", "--json"))] == ["engine-1", "engine-2"]
    assert run("list").split() == [
        "name",
        "role",
        "state",
        "pid",
        "engine-1",
        "half",
        "running",
        "1",
        "engine-2",
        "full",
        "running",
        "1",
    ]
    assert "no worker 'engine-9'" in run("drain", "engine-9", exit_code=2)
    nobody = CliRunner().invoke(cli, ["workers", "list", "--url", "http://127.0.0.1:1"])
    assert nobody.exit_code == 2 and "--url http://127.0.0.1:1" in nobody.output
