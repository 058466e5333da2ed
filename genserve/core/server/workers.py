"""Routes for operators: list, add, drain workers and change their roles, at /v1/workers?model=...

Owns paths and bodies; what may be done, and doing it, is `core.runtime.membership`. The model may be left
out where one alone is served. Adding, draining and changing answer when they are done, which may take as
long as the requests that a worker holds; they go on if the client leaves.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import JSONResponse, Response

from genserve.core.errors import InvalidRequest
from genserve.core.runtime.membership import Membership, WorkerInfo
from genserve.core.server.gateway import Gateway


class _RoleBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: str


def add_worker_routes(app: FastAPI, gateway: Gateway) -> None:
    """Put the routes on `app`."""

    def membership(request: Request) -> Membership:
        name = request.query_params.get("model")
        if name is None:
            if len(gateway.models) != 1:
                names = ", ".join(model.name for model in gateway.models)
                raise InvalidRequest("model", f"name one of the models: {names}")
            name = gateway.models[0].name
        found = gateway.model(name).membership
        if found is None:
            raise InvalidRequest(
                "model", f"the workers of {name} cannot be changed while it serves (executor ray of dllm can)"
            )
        return found

    def shown(request: Request, name: str) -> Response:
        (info,) = [info for info in membership(request).workers() if info.name == name]
        return JSONResponse(_worker_object(info))

    @app.get("/v1/workers")
    async def workers(request: Request) -> Response:
        data = [_worker_object(info) for info in membership(request).workers()]
        return JSONResponse({"object": "list", "data": data})

    @app.post("/v1/workers")
    async def add(request: Request) -> Response:
        role = await _role(request)
        return shown(request, await membership(request).add_worker(role))

    @app.patch("/v1/workers/{name}")
    async def change(request: Request, name: str) -> Response:
        role = await _role(request)
        await membership(request).change_role(name, role)
        return shown(request, name)

    @app.delete("/v1/workers/{name}")
    async def drain(request: Request, name: str) -> Response:
        await membership(request).drain_worker(name)
        return JSONResponse({"name": name, "object": "worker", "deleted": True})


async def _role(request: Request) -> str:
    try:
        return _RoleBody.model_validate_json(await request.body()).role
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0]) if problem["loc"] else "body"
        raise InvalidRequest(field, problem["msg"]) from error


def _worker_object(info: WorkerInfo) -> dict[str, Any]:
    return {"object": "worker", **asdict(info)}
