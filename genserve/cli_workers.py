"""`genserve workers`: the workers of a running server, from the command line.

Owns options and output; the server decides (`core.server.workers`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeAlias

import typer

from genserve import cli_options as opt

app = typer.Typer(
    no_args_is_help=True,
    help="See and change the workers of a running server.",
    rich_markup_mode=None,
)

Url: TypeAlias = Annotated[str, typer.Option(help="The server, with or without /v1.")]
ApiKey: TypeAlias = Annotated[
    str | None, typer.Option(envvar="GENSERVE_API_KEY", help="Sent as a bearer token.")
]
ModelName: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="Model name; the server's only one if not given.")
]
Timeout: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Stop waiting after so many seconds (the server goes on) [default: never]."),
]
Name: TypeAlias = Annotated[str, typer.Argument(help="The worker, as `genserve workers list` shows it.")]
Role: TypeAlias = Annotated[str, typer.Argument(help="colocated or prefill.")]

_URL = "http://127.0.0.1:8000"


@app.callback()
def workers() -> None:
    """See and change the workers of a running server."""


@app.command("list")
def list_(
    url: Url = _URL, model: ModelName = None, api_key: ApiKey = None, as_json: opt.Json = False
) -> None:
    """List the workers: name, role, state and process."""
    found = _asked("GET", "/v1/workers", url, model, api_key, 60.0)["data"]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "role", "state", "pid", box=None, padding=(0, 2, 0, 0))
    for worker in found:
        table.add_row(worker["name"], worker["role"], worker["state"], str(worker["pid"] or ""))
    Console(highlight=False).print(table)


@app.command()
def add(
    role: Annotated[str, typer.Argument(help="colocated or prefill.")] = "colocated",
    url: Url = _URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = None,
) -> None:
    """Start one more worker and wait until it serves."""
    worker = _asked("POST", "/v1/workers", url, model, api_key, timeout_s, {"role": role})
    typer.echo(f"{worker['name']} ({worker['role']}) serves")


@app.command()
def drain(
    name: Name, url: Url = _URL, model: ModelName = None, api_key: ApiKey = None, timeout_s: Timeout = None
) -> None:
    """Wait until a worker has finished what it has, and end it."""
    _asked("DELETE", f"/v1/workers/{_quoted(name)}", url, model, api_key, timeout_s)
    typer.echo(f"{name} is gone")


@app.command("role")
def role_(
    name: Name,
    role: Role,
    url: Url = _URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    timeout_s: Timeout = None,
) -> None:
    """Drain a worker, give it another role, and go on with it."""
    path = f"/v1/workers/{_quoted(name)}"
    worker = _asked("PATCH", path, url, model, api_key, timeout_s, {"role": role})
    typer.echo(f"{worker['name']} is {worker['role']} now")


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _asked(
    method: str,
    path: str,
    url: str,
    model: str | None,
    api_key: str | None,
    timeout_s: float | None,
    body: dict[str, Any] | None = None,
) -> Any:
    """The server's answer as JSON; its errors as ours."""
    import httpx

    from genserve.core.errors import ConfigError, GenserveError

    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    params = {} if model is None else {"model": model}
    try:
        response = httpx.request(
            method, base + path, params=params, headers=headers, json=body, timeout=timeout_s
        )
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from error
    except httpx.TimeoutException as error:
        raise GenserveError(f"no answer within {timeout_s:g} s; the server goes on") from error
    except httpx.HTTPError as error:
        raise ConfigError(f"--url {url}: {error}") from error
    try:
        found = response.json()
    except ValueError as error:
        raise ConfigError(f"--url {url}: no genserve server ({response.status_code})") from error
    if response.is_success:
        return found
    message = found["error"]["message"] if "error" in found else response.text
    raise (ConfigError if response.status_code < 500 else GenserveError)(message)
