"""The command line: `genserve COMMAND`. Each command imports what it needs in its own body.

Owns the list of commands and how errors look: one line on stderr, status 2 for bad input and 1 for
anything else.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from genserve import (
    __version__,
    cli_bench,
    cli_offline,
    cli_plan,
    cli_serve,
    cli_simulate,
    cli_t2i,
    cli_t2i_graph,
    cli_text,
    cli_workers,
)
from genserve import cli_options as opt
from genserve.core.errors import ConfigError, GenserveError, InvalidRequest, ModelNotFound

_BAD_INPUT = (ConfigError, InvalidRequest, ModelNotFound)


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GenserveError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, _BAD_INPUT) else 1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # its panels cut names and defaults, and read [brackets] as markup
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"genserve {__version__}")
        raise typer.Exit


@app.callback()
def genserve(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve generative models: run a server, generate text, measure and simulate."""


app.command("serve")(cli_serve.serve)
app.command("generate")(cli_text.generate)
app.command("chat")(cli_text.chat)
cli_bench.app.command("offline")(cli_offline.offline)
app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_simulate.app, name="simulate")
app.add_typer(cli_plan.app, name="plan")
app.add_typer(cli_workers.app, name="workers")
cli_t2i.app.command("graph")(cli_t2i_graph.graph)
app.add_typer(cli_t2i.app, name="t2i")


@app.command()
def models(as_json: opt.Json = False) -> None:
    """List the built-in models: origin, licence, size, cached or not."""
    from dataclasses import asdict

    from genserve.core.models.registry import list_models

    listed = list_models()
    if as_json:
        import json

        typer.echo(json.dumps([asdict(model) for model in listed], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for model in listed:
        table = Table(title=model.name, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_row("family", model.family)
        table.add_row("what", model.description)
        table.add_row("source", model.source)
        table.add_row("licence", model.licence)
        if model.packaged:
            table.add_row("size", f"{model.disk_bytes / 1e6:.0f} MB, packaged: nothing to fetch")
        else:
            table.add_row(
                "size", f"{model.download_bytes / 1e6:.0f} MB down, {model.disk_bytes / 1e6:.0f} MB on disk"
            )
            table.add_row("cached", model.folder if model.cached else "no: fetched on first use")
        console.print(table)


@app.command()
def config(
    models: opt.Models = None,
    config: opt.ConfigFile = None,
    overrides: opt.Overrides = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file instead.")
    ] = False,
    as_json: opt.Json = False,
) -> None:
    """Print the configuration that `genserve serve` would use. API keys are hidden."""
    import json

    import yaml

    from genserve.core.config import READABLE
    from genserve.server_config import ServerConfig, server_config

    if schema:
        typer.echo(json.dumps(ServerConfig.model_json_schema(), indent=2))
        return
    settings = server_config(config, models=models or (), overrides=overrides or ())
    if as_json:
        typer.echo(settings.model_dump_json(indent=2))
        return
    data = settings.model_dump(mode="json", context=READABLE, exclude_none=True)
    typer.echo(yaml.safe_dump(data, sort_keys=False).rstrip())


def main() -> None:
    """What the `genserve` script runs."""
    app()


if __name__ == "__main__":
    main()
