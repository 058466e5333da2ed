"""Bodies of workflow requests: a pydantic model made from each workflow's declared inputs.

Owns the JSON form of every port type, so that one model validates, names the bad field and describes itself
(`/openapi.json`). Knows nothing of routes and of how a workflow runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    create_model,
)

from genserve.core.errors import InvalidRequest, UnsupportedField
from genserve.core.server.pictures import OutputFormat, from_base64, opaque
from genserve.core.server.protocol import first_error
from genserve.core.workflows import REQUIRED, LoraUse, PortType, WorkflowInfo, WorkflowInput

MAX_IMAGES = 10  # of one request, as in OpenAI's API
MAX_LORAS = 16
MAX_SEED = (1 << 63) - 1 - MAX_IMAGES
MAX_TEXT_CHARS = 32_000

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _picture(value: Any) -> Any:
    if isinstance(value, str):
        return opaque(from_base64(value, ""))
    if hasattr(value, "convert"):  # decoded already
        return value
    raise InvalidRequest("", "must be a picture in base64, or a data URL")


_Picture = Annotated[
    Any,
    PlainValidator(_picture),
    WithJsonSchema(
        {
            "type": "string",
            "contentEncoding": "base64",
            "contentMediaType": "image/*",
            "description": "A PNG, JPEG or WebP picture in base64, or as a data URL.",
        }
    ),
]


def _tensor(value: Any) -> Any:
    raise UnsupportedField("", "tensors cannot be sent over HTTP")


class LoraBody(BaseModel):
    """An adapter that is registered with the model, and its scale."""

    model_config = _STRICT

    name: str
    scale: float = Field(default=1.0, ge=-10, le=10)


class _RunOptions(BaseModel):
    """What every request for images may say beyond a workflow's inputs."""

    model_config = _STRICT

    loras: list[LoraBody] = Field(default=[], max_length=MAX_LORAS)
    lora_max_late_steps: int = Field(
        default=0,
        ge=0,
        description="Steps that may run before an adapter is there; 0 waits for it.",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, description="Seconds after which the request ends with status 504."
    )
    output_format: OutputFormat = "png"
    output_compression: int | None = Field(
        default=None, ge=0, le=100, description="Quality of JPEG and WebP; 95 by default."
    )


class InvokeOptions(_RunOptions):
    """Body of `/v1/workflows/{name}/invoke`, but for `inputs`, whose form the workflow tells."""

    n: int = Field(default=1, ge=1, le=MAX_IMAGES, description="Images; image i has seed `seed + i`.")
    preview_every_steps: int = Field(
        default=0, ge=0, description="A preview after every so many steps, in a job's events; 0: none."
    )
    background: bool = Field(default=False, description="Answer at once with a job.")


class ImageOptions(_RunOptions):
    """What `/v1/images/...` take beyond a workflow's inputs."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_IMAGES)
    size: str | None = Field(default=None, description='"auto", or "WIDTHxHEIGHT".')
    response_format: Literal["b64_json"] = "b64_json"
    stream: bool = False
    partial_images: int = Field(
        default=0, ge=0, le=3, description="With `stream`: previews of each image, at most."
    )
    # Bookkeeping of the caller: accepted, without effect on the answer.
    user: str | None = None
    safety_identifier: str | None = None


def annotation_of(port: PortType, limits: Mapping[str, Any] | None = None) -> Any:
    """The type of a value of `port` in JSON; `limits` as in `WorkflowInfo.limits`."""
    limits = limits or {}
    if port.kind == "image":
        return _Picture
    if port.kind in ("tensor", "tensors"):
        return Annotated[Any, PlainValidator(_tensor), WithJsonSchema({"not": {}})]
    if port.kind == "json":
        return Any
    if port.kind == "bool":
        return bool
    if port.kind == "list":
        assert port.item is not None
        return Annotated[list[annotation_of(port.item, limits)], Field(max_length=1024)]  # type: ignore[misc]
    if port.kind == "text":
        return Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
    named = {"minimum": "ge", "maximum": "le", "multiple_of": "multiple_of"}
    bounds = {named[key]: value for key, value in limits.items() if key in named}
    return Annotated[int if port.kind == "int" else float, Field(**bounds)]


class WorkflowBody:
    """The form of one workflow's inputs."""

    def __init__(self, info: WorkflowInfo) -> None:
        self.info = info
        fields: dict[str, Any] = {}
        for index, declared in enumerate(info.inputs):
            limits = dict(info.limits.get(declared.name, {}))
            if declared.name == "seed":
                limits = {"minimum": 0, "maximum": MAX_SEED, **limits}
            kind = annotation_of(declared.type, limits)
            default = _default(declared)
            shown: dict[str, Any] = {"alias": declared.name, "description": declared.description or None}
            if default is REQUIRED:
                fields[f"input_{index}"] = (kind, Field(**shown))
            else:
                kind = kind | None if default is None else kind
                fields[f"input_{index}"] = (kind, Field(default=default, **shown))
        title = f"{info.name} inputs"
        self.inputs_model: type[BaseModel] = create_model(title, __config__=_STRICT, **fields)
        inputs = (
            (self.inputs_model, ...)
            if any(_default(declared) is REQUIRED for declared in info.inputs)
            else (self.inputs_model, Field(default_factory=self.inputs_model))
        )
        title = f"{info.name} request"
        self.body_model: type[InvokeOptions] = create_model(title, __base__=InvokeOptions, inputs=inputs)  # type: ignore[call-overload]

    def inputs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The validated inputs among `values`, pictures decoded; only those that were given.

        `InvalidRequest` names the input.
        """
        try:
            checked = self.inputs_model.model_validate(dict(values))
        except ValidationError as error:
            raise first_error(error) from None
        return self._given(checked)

    def parse(self, data: Any) -> tuple[InvokeOptions, dict[str, Any]]:
        """The options and validated inputs of an invoke body; errors name fields as they were sent."""
        try:
            body = self.body_model.model_validate(data)
        except ValidationError as error:
            raise first_error(error) from None
        return body, self._given(body.inputs)  # type: ignore[attr-defined]

    def _given(self, checked: BaseModel) -> dict[str, Any]:
        return {
            declared.name: getattr(checked, f"input_{index}")
            for index, declared in enumerate(self.info.inputs)
            if f"input_{index}" in checked.model_fields_set
        }


def _default(declared: WorkflowInput) -> Any:
    """The default of a request over HTTP, where a seed that nobody gives is drawn."""
    drawn = declared.name == "seed" and declared.default is REQUIRED
    return None if drawn else declared.default


class WorkflowBodies:
    """The forms of workflows, made once each."""

    def __init__(self) -> None:
        self._made: dict[str, WorkflowBody] = {}

    def of(self, info: WorkflowInfo) -> WorkflowBody:
        made = self._made.get(info.name)
        if made is None or made.info != info:
            made = self._made[info.name] = WorkflowBody(info)
        return made


def lora_uses(loras: list[LoraBody], info: WorkflowInfo) -> tuple[LoraUse, ...]:
    """The adapters asked for, or an `InvalidRequest` for one that isn't registered."""
    for index, lora in enumerate(loras):
        if lora.name not in info.loras:
            there = ", ".join(info.loras) or "none"
            raise InvalidRequest(
                f"loras[{index}].name", f"no adapter {lora.name[:100]!r} here (there is: {there})"
            )
    return tuple(LoraUse(lora.name, lora.scale) for lora in loras)


def describe(info: WorkflowInfo, body: WorkflowBody | None = None) -> dict[str, Any]:
    """A workflow as JSON; with `body`, the JSON schema of its request too."""
    inputs = [
        {
            "name": declared.name,
            "type": type_name(declared.type),
            "required": _default(declared) is REQUIRED,
            **({} if _default(declared) is REQUIRED else {"default": _default(declared)}),
            **info.limits.get(declared.name, {}),
            **({"description": declared.description} if declared.description else {}),
        }
        for declared in info.inputs
    ]
    shown = {
        "id": info.name,
        "object": "workflow",
        "family": info.family,
        "description": info.description,
        "inputs": inputs,
        "outputs": [{"name": output.name, "type": type_name(output.type)} for output in info.outputs],
        "loras": list(info.loras),
    }
    return shown if body is None else {**shown, "schema": body.body_model.model_json_schema()}


def type_name(port: PortType) -> str:
    return f"list of {type_name(port.item)}" if port.item is not None else port.kind
