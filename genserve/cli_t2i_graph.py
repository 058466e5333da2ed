"""`genserve t2i graph`: a picture of a workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def graph(
    file: Annotated[
        Path, typer.Argument(help="A Python file that defines a workflow (it is executed), or JSON.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="An .svg, .png or .pdf file [default: the workflow's name, .svg].")
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass", metavar="NAME", help="A pass to run, in this order [default: those always run]."
        ),
    ] = None,
    workflow: Annotated[str | None, typer.Option(help="Which workflow, if the file has several.")] = None,
) -> None:
    """Draw a workflow before and after the compiler's passes."""
    from genserve.t2i.compiler import Stage, compile_workflow
    from genserve.t2i.draw import draw
    from genserve.t2i.files import load_workflow
    from genserve.t2i.passes import DEFAULT

    found = load_workflow(file, workflow)
    names = DEFAULT if passes is None else tuple(passes)
    compiled = compile_workflow(found, names, identify=lambda graph: graph)  # no need to read weights
    written, done = compiled.stages[0].graph, compiled.graph
    path = output or Path(f"{found.name}.svg")
    after = f"after {', '.join(names)}" if names else "without passes"
    draw([Stage(f"{found.name}, as written", written), Stage(after, done)], path)
    typer.echo(f"{path}: {_size(written)} as written, {_size(done)} {after}")


def _size(graph: object) -> str:
    from genserve.t2i.graph import Graph, walk

    assert isinstance(graph, Graph)
    return f"{sum(1 for _ in walk(graph.nodes))} nodes"
