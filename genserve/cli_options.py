"""Options that several commands share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

_MODEL = "A built-in name, a Hugging Face folder or hub id, or a GGUF file"

Model: TypeAlias = Annotated[str, typer.Option("--model", "-m", help=f"{_MODEL}.")]
Models: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="[NAME=][FAMILY:]MODEL",
        help=f"{_MODEL}; repeat for several. Families: ar, dllm, t2i; by default the model tells its own.",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None, typer.Option("--config", help="A YAML file; `genserve config --schema` describes it.")
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, e.g. models.0.kv_pool=2GB."),
]
ApiKeys: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", envvar="GENSERVE_API_KEY", help="A key that clients may use; repeat for several."
    ),
]
Dtype: TypeAlias = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(help="Of weights and KV. auto: float32 on a CPU, else the model's own."),
]
KvPool: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--kv-pool", metavar="BYTES", help="Memory for KV pages, e.g. 512MiB or 4GB [default: 1GiB]."
    ),
]
MaxRunning: TypeAlias = Annotated[
    int | None, typer.Option(help="Sequences in a step, at most [default: 64].")
]
BudgetTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Tokens in a step [default: ar 512, dllm 1024].")
]
NumThreads: TypeAlias = Annotated[int | None, typer.Option(help="CPU threads; by default all cores.")]
Executor: TypeAlias = Annotated[
    Literal["thread", "ray"] | None,
    typer.Option(help="Where engines run: in this process or in Ray actors [default: thread]."),
]
MaxTokens: TypeAlias = Annotated[int, typer.Option(min=0, help="Output tokens at most.")]
Temperature: TypeAlias = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
ModelTemperature: TypeAlias = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy [default: 1, of diffusion models 0].")
]
TopP: TypeAlias = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")]
Seed: TypeAlias = Annotated[
    int | None, typer.Option(help="Of the sampling; the same seed gives the same text.")
]
Stop: TypeAlias = Annotated[list[str] | None, typer.Option(help="Ends the text; repeat for several.")]
Options: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="Of diffusion models, e.g. cache=none or block_length=16; repeat for several.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Of simulated diffusion deployments: `simulate dllm` and `plan dllm`.
Workload: TypeAlias = Annotated[
    str,
    typer.Option(help="sangam-sharegpt, sangam-arxiv, chat, code, mooncake-like, tiny, or a trace's path."),
]
ModelledDiffusion: TypeAlias = Annotated[str, typer.Option("--model", "-m", help="llada-8b or dream-7b.")]
Hardware: TypeAlias = Annotated[str, typer.Option(help="h100, h200 or a100.")]
NumWorkers: TypeAlias = Annotated[int, typer.Option(min=1, help="Devices, each with the whole model.")]
ModelledRunning: TypeAlias = Annotated[int, typer.Option(min=1, help="Requests in a step, at most.")]
BudgetPolicy: TypeAlias = Annotated[str, typer.Option(help="Of the budget: signed or paper.")]
PrefillTokens: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Tokens of a prefill worker's step, at most.")
]
Cache: TypeAlias = Annotated[str, typer.Option(help="none, prefix, dual, dkv or block.")]
BlockLength: TypeAlias = Annotated[int, typer.Option(min=1, help="Positions denoised together.")]
TokensPerPass: TypeAlias = Annotated[
    float | None,
    typer.Option(min=1.0, help="Positions that a pass commits on average; by default as calibrated."),
]
NumMasks: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Masks appended to a prompt; by default 1024, or 512 for sangam-arxiv. Longer outputs are cut.",
    ),
]
Profiles: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Folder of AIConfigurator tables to take kernel times from, not a roofline."),
]
Slo: TypeAlias = Annotated[str | None, typer.Option(help="Limits in seconds, e.g. ttft=2,e2e=20.")]
SimulationSeed: TypeAlias = Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and passes.")]


def parsed(options: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` options with their values read as YAML; `ConfigError` for other forms."""
    import yaml

    from genserve.core.errors import ConfigError

    found: dict[str, Any] = {}
    for option in options or ():
        key, separator, text = option.partition("=")
        try:
            found[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--option {option}: the value is not YAML") from error
        if not separator or not key:
            raise ConfigError(f"--option {option}: expected KEY=VALUE")
    return found


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
