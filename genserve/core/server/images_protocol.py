"""What `/v1/images/generations` and `/v1/images/edits` accept, as the official `openai` client sends it.

Owns the way from such a body to inputs of a workflow: the model's workflow that takes the given pictures runs,
and every field is an option, an input of that workflow, or refused by name. Knows nothing of how it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from genserve.core.errors import InvalidRequest, UnsupportedField
from genserve.core.server.gateway import Gateway, ServedWorkflows
from genserve.core.server.pictures import decode, from_base64, mask_of, opaque
from genserve.core.server.protocol import first_error
from genserve.core.server.workflow_run import Invocation, image_outputs
from genserve.core.server.workflow_schema import ImageOptions, WorkflowBodies, lora_uses
from genserve.core.workflows import REQUIRED, InvokeRequest, WorkflowInfo

# Values that ask for nothing beyond what is done anyway, of fields that are otherwise refused.
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "background": ("auto", "opaque"),
    "quality": ("auto", "standard"),
    "moderation": ("auto", "low"),
    "input_fidelity": ("low",),
    "size": ("auto",),
}
_HINTS = {
    "background": "pictures are opaque",
    "quality": "choose num_steps and guidance_scale instead",
    "style": "say it in the prompt, or name an adapter in loras",
    "response_format": "pictures are not kept: ask for b64_json",
}
# Other names that clients use for inputs of workflows.
_ALIASES = {"steps": "num_steps", "num_inference_steps": "num_steps", "mask_image": "mask"}
_PICTURES = ("image", "mask", "control_image")
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


def generation(gateway: Gateway, bodies: WorkflowBodies, data: bytes, request_id: str) -> ParsedImages:
    """The request in a JSON body. Decodes pictures: not for an event loop if the body is large."""
    try:
        fields = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return from_fields(gateway, bodies, fields, request_id, strict=True)


def edit(
    gateway: Gateway, bodies: WorkflowBodies, items: Iterable[tuple[str, str | bytes]], request_id: str
) -> ParsedImages:
    """The request in a form's fields (text) and files (bytes). Decodes pictures."""
    fields = form_fields(items)
    if fields.get("image") is None:
        raise InvalidRequest("image", "is required: a PNG, JPEG or WebP file")
    return from_fields(gateway, bodies, fields, request_id, strict=False)


class ParsedImages:
    """A validated request of `/v1/images/...`: its options, and what is to run."""

    def __init__(self, options: ImageOptions, invocation: Invocation) -> None:
        self.options = options
        self.invocation = invocation

    def with_previews(self) -> Invocation:
        """The same, with at most `partial_images` previews of each image, evenly spread over its steps."""
        num_steps = self.invocation.num_steps or 1
        every = -(-num_steps // (self.options.partial_images + 1))
        request = replace(self.invocation.request, preview_every_steps=every)
        return replace(self.invocation, request=request)


def form_fields(items: Iterable[tuple[str, str | bytes]]) -> dict[str, Any]:
    """A form's fields as the JSON they stand for: `image[]`, `loras[][name]` and `scheduler[shift]` are nested.

    Text in nested fields that reads as a JSON number or boolean is one.
    """
    found: dict[str, Any] = {}
    columns: dict[str, dict[str, list[Any]]] = {}
    for key, value in items:
        name, bracket, rest = key.partition("[")
        if not bracket:
            if name in found:
                raise InvalidRequest(name[:200], "is given twice")
            found[name] = value
        elif rest in ("]", "0]") and name in _PICTURES:
            if name in found:
                raise UnsupportedField(f"{name}[1]", "one picture is taken, not several")
            found[name] = value
        elif rest == "]":
            _nested(found, name, [], name).append(_scalar(value))
        elif rest.startswith("][") and rest.endswith("]"):
            columns.setdefault(name, {}).setdefault(rest[2:-1], []).append(_scalar(value))
        elif rest.endswith("]"):
            target = _nested(found, name, {}, name)
            *parents, last = rest[:-1].split("][")
            for part in parents:
                target = _nested(target, part, {}, name)
            target[last] = _scalar(value)
        else:
            raise InvalidRequest(key[:200], "is no name of a field")
    for name, by_key in columns.items():
        if len({len(values) for values in by_key.values()}) != 1:
            raise InvalidRequest(name[:200], "give each element the same keys, or the list as JSON text")
        found[name] = [dict(zip(by_key, row, strict=True)) for row in zip(*by_key.values(), strict=True)]
    return found


def _nested(target: dict[str, Any], key: str, empty: Any, field: str) -> Any:
    """What `target` has under `key`, `empty` at first; `InvalidRequest` if it is something of another kind."""
    found = target.setdefault(key, empty)
    if type(found) is not type(empty):
        raise InvalidRequest(field[:200], "is given in two forms")
    return found


def _scalar(value: str | bytes) -> Any:
    if isinstance(value, bytes):
        return value
    try:
        read = from_json(value, allow_inf_nan=False)
    except ValueError:
        return value
    return read if isinstance(read, int | float | bool) else value


def from_fields(
    gateway: Gateway, bodies: WorkflowBodies, fields: dict[str, Any], request_id: str, *, strict: bool
) -> ParsedImages:
    """The request in fields, pictures among them as base64 or bytes. Without `strict`, text stands for numbers."""
    asked = {key: value for key, value in fields.items() if not _asks_nothing(key, value)}
    named = asked.get("model")
    served = gateway.image_model(named if isinstance(named, str) else None)
    if not strict:
        asked = {key: _json_text(value) if key == "loras" else value for key, value in asked.items()}
    own = {key: asked.pop(key) for key in list(asked) if key in ImageOptions.model_fields}
    if own.get("response_format") == "url":
        raise UnsupportedField("response_format", _HINTS["response_format"])
    try:
        options = ImageOptions.model_validate(own, strict=strict)
    except ValidationError as error:
        raise first_error(error) from None
    if options.partial_images and not options.stream:
        raise InvalidRequest("partial_images", "is only for stream: true")
    names = {_ALIASES.get(key, key): key for key in asked}
    for key in asked:
        if names[_ALIASES.get(key, key)] != key:
            raise InvalidRequest(key, f"contradicts {names[_ALIASES.get(key, key)]}")
    values = {_ALIASES.get(key, key): value for key, value in asked.items()}
    if not isinstance(values.get("prompt"), str):
        raise InvalidRequest("prompt", "must be a string" if "prompt" in values else "is required")
    _decode_pictures(values, names)
    if options.size is not None:
        values["width"], values["height"] = _size(options.size)
        names |= {"width": "size", "height": "size"}
    only = options.model if options.model != served.name else None
    info = workflow_for(served, values, names, only)
    _fit_to_picture(values, names, info)
    if not strict:
        values = {name: _from_text(info, name, value) for name, value in values.items()}
    invocation = Invocation(
        served,
        info,
        InvokeRequest(request_id, info.name, {}),
        options.output_format,
        options.output_compression,
        names,
    )
    with invocation.fields_as_sent():
        inputs = bodies.of(info).inputs(values)
    request = InvokeRequest(
        request_id,
        info.name,
        inputs,
        num_images=options.n,
        loras=lora_uses(options.loras, info),
        lora_max_late_steps=options.lora_max_late_steps,
        deadline_s=options.deadline_s,
    )
    invocation = Invocation(
        served, info, request, options.output_format, options.output_compression, {"num_images": "n"} | names
    ).with_seed()
    return ParsedImages(options, invocation)


def workflow_for(
    served: ServedWorkflows, values: Mapping[str, Any], names: Mapping[str, str], only: str | None = None
) -> WorkflowInfo:
    """The model's first workflow (or the one called `only`) that makes a picture of just these inputs.

    `UnsupportedField` names an input that none takes, `InvalidRequest` one that is missing.
    """
    named = [info for info in served.client.workflows().values() if only in (None, info.name)]
    fitting = [info for info in named if image_outputs(info)]
    if not fitting:
        raise InvalidRequest("model", f"{only or served.name} makes no image")
    # Pictures choose the workflow, and in this order: the rest are fields that it has or has not.
    for name in (*_PICTURES, *(name for name in values if name not in _PICTURES)):
        if name in values:
            left = [info for info in fitting if any(declared.name == name for declared in info.inputs)]
        elif name in _PICTURES:
            left = [info for info in fitting if not _requires(info, name)]
        else:
            continue
        if not left:
            sent = names.get(name, name)
            if name in values:
                hint = _HINTS.get(sent)
                text = (
                    f"is not supported: {hint}"
                    if hint
                    else f"is nothing that {only or served.name} takes here"
                )
                raise UnsupportedField(sent, text)
            raise InvalidRequest(sent, f"is required by {only or served.name}")
        fitting = left
    return fitting[0]


def _requires(info: WorkflowInfo, name: str) -> bool:
    return any(declared.name == name and declared.default is REQUIRED for declared in info.inputs)


def _decode_pictures(values: dict[str, Any], names: Mapping[str, str]) -> None:
    for name in _PICTURES:
        value = values.get(name)
        if value is None:
            continue
        sent = names[name]
        if not isinstance(value, str | bytes):
            raise InvalidRequest(sent, "must be one picture")
        image = from_base64(value, sent) if isinstance(value, str) else decode(value, sent)
        values[name] = mask_of(image) if name == "mask" else opaque(image)
    image = values.get("image")
    for name in ("mask", "control_image"):
        other = values.get(name)
        if image is not None and other is not None and other.size != image.size:
            raise InvalidRequest(
                names[name], f"must be as large as image: {_text(image.size)}, not {_text(other.size)}"
            )


def _fit_to_picture(values: dict[str, Any], names: dict[str, str], info: WorkflowInfo) -> None:
    """A picture that is changed keeps its size; `size` may repeat it."""
    picture = values.get("image") or values.get("control_image")
    declared = {declared.name for declared in info.inputs}
    if picture is None or not {"width", "height"} <= declared:
        return
    sent = names["image" if values.get("image") is not None else "control_image"]
    if "width" in values and (values["width"], values["height"]) != picture.size:
        raise InvalidRequest("size", f"must be that of {sent}, {_text(picture.size)}, or auto")
    values["width"], values["height"] = picture.size
    names |= {"width": sent, "height": sent}


def _text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _size(text: str) -> tuple[int, int]:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InvalidRequest("size", f'must be "auto" or "WIDTHxHEIGHT", not {text[:40]!r}')
    return int(found[1]), int(found[2])


def _asks_nothing(key: str, value: Any) -> bool:
    if value is None:
        return True
    return any(type(value) is type(other) and value == other for other in _ASKS_NOTHING.get(key, ()))


def _json_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except ValueError:
        raise InvalidRequest("loras", "must be a JSON list") from None


def _from_text(info: WorkflowInfo, name: str, value: Any) -> Any:
    """A form's text as the type of its input; text that isn't one stays, and is refused as such."""
    kind = next((declared.type.kind for declared in info.inputs if declared.name == name), "text")
    if kind in ("text", "image") or not isinstance(value, str):
        return value
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError:
        return value
