"""The OpenAPI document of `/v1/images`, `/v1/workflows` and `/v1/jobs`; each workflow has a typed path of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.core.server.workflow_schema import ImageOptions, WorkflowBody
from genserve.core.workflows import WorkflowInfo

_ERRORS = {
    "400": "A field is wrong; the error names it.",
    "404": "No such workflow, model or job.",
    "429": "The queue is full.",
    "503": "The server is shutting down, or has lost what ran this.",
    "504": "The deadline passed.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_RESULT_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "workflow.result"},
        "workflow": {"type": "string"},
        "outputs": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Of each image, its outputs by name; pictures are data URLs.",
        },
        "seeds": {"type": ["array", "null"], "items": {"type": "integer"}},
        "warnings": {"type": "array", "items": {"type": "string"}},
        "receipt": {"type": "object"},
    },
}
_JOB_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "job"},
        "workflow": {"type": "string"},
        "status": {"enum": ["running", "succeeded", "failed", "cancelled"]},
        "created_at": {"type": "integer"},
        "finished_at": {"type": ["integer", "null"]},
        "progress": {"type": ["object", "null"]},
        "error": {"type": ["object", "null"]},
        "result": {"anyOf": [{"$ref": "#/components/schemas/Result"}, {"type": "null"}]},
    },
}


def document(workflows: Sequence[tuple[WorkflowInfo, WorkflowBody]]) -> dict[str, Any]:
    """OpenAPI 3.1, as JSON."""
    schemas: dict[str, Any] = {"Error": _ERROR_SCHEMA, "Result": _RESULT_SCHEMA, "Job": _JOB_SCHEMA}
    paths: dict[str, Any] = {
        "/v1/images/generations": {"post": _operation("Make images", _images(schemas), "application/json")},
        "/v1/images/edits": {
            "post": _operation("Change an image", _edits(schemas), "multipart/form-data"),
        },
        "/v1/workflows": {"get": _operation("List the workflows")},
        "/v1/workflows/{name}": {"get": _operation("A workflow and its schema", parameters=["name"])},
        "/v1/jobs": {"get": _operation("List the jobs")},
        "/v1/jobs/{id}": {
            "get": _operation("A job", answer="Job", parameters=["id"]),
            "delete": _operation("Stop a job and forget it", parameters=["id"]),
        },
        "/v1/jobs/{id}/cancel": {"post": _operation("Stop a job", answer="Job", parameters=["id"])},
        "/v1/jobs/{id}/events": {
            "get": _operation("A job's events, from the start or Last-Event-ID", parameters=["id"])
        },
    }
    for info, body in workflows:
        form = _component(
            schemas, body.body_model.model_json_schema(ref_template="#/components/schemas/{model}")
        )
        answered = _operation(info.description or f"Run {info.name}", form, "application/json", "Result")
        answered["responses"]["202"] = {
            "description": "The job of a request in the background.",
            "content": _content({"$ref": "#/components/schemas/Job"}),
        }
        paths[f"/v1/workflows/{info.name}/invoke"] = {"post": answered}
    return {
        "openapi": "3.1.0",
        "info": {"title": "genserve", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _component(schemas: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with its definitions moved to `schemas`."""
    schemas.update(schema.pop("$defs", {}))
    return schema


def _images(schemas: dict[str, Any]) -> dict[str, Any]:
    schema = _component(schemas, ImageOptions.model_json_schema(ref_template="#/components/schemas/{model}"))
    properties = {"prompt": {"type": "string"}, **schema["properties"]}
    more = "Further fields are inputs of the workflow that runs: seed, num_steps, guidance_scale and so on."
    return {
        "type": "object",
        "properties": properties,
        "required": ["prompt"],
        "description": more,
    }


def _edits(schemas: dict[str, Any]) -> dict[str, Any]:
    schema = _images(schemas)
    file = {"type": "string", "format": "binary"}
    return {
        **schema,
        "properties": {**schema["properties"], "image": file, "mask": file},
        "required": ["prompt", "image"],
    }


def _operation(
    summary: str,
    body: dict[str, Any] | None = None,
    media_type: str = "",
    answer: str | None = None,
    parameters: Sequence[str] = (),
) -> dict[str, Any]:
    schema = {"type": "object"} if answer is None else {"$ref": f"#/components/schemas/{answer}"}
    error = _content({"$ref": "#/components/schemas/Error"})
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": _content(schema)},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {media_type: {"schema": body}}}
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    return operation


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
