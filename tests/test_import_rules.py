"""Who may import whom, read from the syntax trees; and what importing genserve must not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "genserve"
FRONT_ENDS = ("dllm", "t2i", "ar")

# Layers of the core, bottom up: a module imports only its own layer and those before it.
LAYERS = [
    ("errors", "types", "config", "control", "workflows"),
    (
        "cluster",
        "cost",
        "dispatch",
        "flow",
        "kv.blocks",
        "kv.parts",
        "metrics",
        "placement",
        "scheduling",
        "tensors.ref",
        "text",
        "workload",
    ),
    ("sim",),
    ("kv.pool", "models", "tensors"),
    ("runtime", "server"),
    ("testing",),
]
# What decides is plain: the core's layers 0 to 2, and the policies of the front ends.
POLICIES = (
    *("ar.engine", "ar.step", "ar.cost", "ar.simulate"),
    *("dllm.request", "dllm.canvas", "dllm.step", "dllm.messages", "dllm.cache", "dllm.budget"),
    *("dllm.routing", "dllm.engine", "dllm.dispatcher", "dllm.cost", "dllm.simulate"),
    *("dllm.scenario", "dllm.plan"),
    *("t2i.messages", "t2i.outline", "t2i.instance", "t2i.ledger", "t2i.job", "t2i.books", "t2i.scheduler"),
    *("t2i.dispatching", "t2i.endings", "t2i.recovery", "t2i.coordinator", "t2i.cost", "t2i.simulate"),
    *("t2i.ports", "t2i.graph", "t2i.model", "t2i.request", "t2i.typecheck", "t2i.values", "t2i.loop_source"),
    *("t2i.tracing", "t2i.rolling", "t2i.binding", "t2i.workflow", "t2i.emission", "t2i.inlining"),
    *("t2i.verify", "t2i.serialize", "t2i.reference", "t2i.approx_cache", "t2i.layout"),
    *("t2i.passes", "t2i.passes.fold_constants", "t2i.passes.common_subexpressions", "t2i.passes.dead_nodes"),
    *("t2i.passes.lora", "t2i.passes.cfg_split", "t2i.passes.step_cache", "t2i.passes.approximate_cache"),
)
IMPURE = ("torch", "ray", "asyncio", "time", "transformers", "random", "threading", "fastapi", "uvicorn")
HEAVY = ("torch", "ray", "transformers", "fastapi", "uvicorn", "numpy", "matplotlib", "xgrammar", "numba")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def layer(name: str) -> int | None:
    """The layer of `genserve.core....`; None for package markers and modules outside the core."""
    inner = name.removeprefix("genserve.core.")
    if inner == name:
        return None
    return next(
        (
            index
            for index, members in enumerate(LAYERS)
            if any(inner == member or inner.startswith(member + ".") for member in members)
        ),
        None,
    )


def imports(tree: ast.AST, *, at_import_time: bool = False):
    """(module, names) of every import statement but those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports inside genserve are absolute"
            yield node.module or "", tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.orelse, []), at_import_time=at_import_time)
        elif not (at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports(node, at_import_time=at_import_time)


def targets(tree: ast.AST, **options):
    """Names of the genserve modules that `tree` imports."""
    for module, names in imports(tree, **options):
        if module.split(".")[0] == "genserve":
            found = [f"{module}.{name}" for name in names if f"{module}.{name}" in MODULES]
            yield from found or [module]


def is_pure(name: str) -> bool:
    found = layer(name)
    return (found is not None and found <= 2) or name.removeprefix("genserve.") in POLICIES


PURE = [name for name in MODULES if is_pure(name)]


def test_the_rules_see_the_code():
    assert {"genserve.core.control", "genserve.core.kv.blocks", "genserve.core.sim.simulator"} <= set(PURE)
    assert {f"genserve.{policy}" for policy in POLICIES} <= set(PURE)
    outside = [
        name
        for name, tree in MODULES.items()
        if name.startswith("genserve.core.") and layer(name) is None and tree.body[1:]
    ]
    assert outside == [], "modules of the core that no layer claims"


@pytest.mark.parametrize("name", [name for name in MODULES if layer(name) is not None])
def test_the_core_imports_downwards_and_no_front_end(name):
    for target in targets(MODULES[name]):
        assert target.startswith("genserve.core"), f"{name} imports {target}"
        found = layer(target)
        assert found is None or found <= layer(name), (
            f"{name} (layer {layer(name)}) imports {target} ({found})"
        )


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_never_import_each_other(front_end):
    others = tuple(f"genserve.{other}" for other in FRONT_ENDS if other != front_end)
    for name, tree in MODULES.items():
        if name.startswith(f"genserve.{front_end}"):
            wrong = [
                t for t in targets(tree) if any(t == other or t.startswith(other + ".") for other in others)
            ]
            assert wrong == [], name


@pytest.mark.parametrize("name", PURE)
def test_what_decides_is_pure(name):
    """No torch, Ray, asyncio or clock, anywhere; randomness only from generators that are passed in."""
    for module, names in imports(MODULES[name]):
        root = module.split(".")[0]
        assert root not in IMPURE, f"{name} imports {module}"
        assert not (root == "numpy" and "random" in (*module.split("."), *names)), f"{name} imports {module}"
    aliases = {"np", "numpy"}
    for node in ast.walk(MODULES[name]):
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)):
            continue
        inner = node.value
        if inner.attr == "random" and isinstance(inner.value, ast.Name) and inner.value.id in aliases:
            allowed = ("Generator", "SeedSequence", "default_rng", "PCG64", "BitGenerator")
            assert node.attr in allowed, f"{name}:{node.lineno} uses {ast.unparse(node)}"


def test_a_seeded_generator_is_never_made_without_a_seed():
    for name in PURE:
        for node in ast.walk(MODULES[name]):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng"):
                assert node.args or node.keywords, f"{name}:{node.lineno}"


def test_ray_is_imported_in_modules_named_after_it():
    homes = {name for name in MODULES if name.startswith("genserve.core.runtime.ray_")}
    users = {
        name for name, tree in MODULES.items() if any(m.split(".")[0] == "ray" for m, _ in imports(tree))
    }
    assert users == homes != set()
    for name, tree in MODULES.items():
        if name not in homes:
            direct = set(targets(tree, at_import_time=True))
            assert not homes & direct, f"{name} imports Ray when it is imported"


def test_in_the_core_asyncio_lives_in_runtime_and_server_only_and_workers_block():
    users = {
        name for name, tree in MODULES.items() if any(m.split(".")[0] == "asyncio" for m, _ in imports(tree))
    }
    allowed = ("genserve.core.runtime.", "genserve.core.server.", "genserve.core.testing")
    assert {
        name for name in users if name.startswith("genserve.core.") and not name.startswith(allowed)
    } == set()
    assert {
        name for name in users if name.rsplit(".", 1)[1] in ("worker", "denoise", "engine", "batching")
    } == set()


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_importing_genserve_is_light():
    assert loaded_by("import genserve") & {*HEAVY, "pydantic", "typer", "rich"} == set()
    assert loaded_by("from genserve import SamplingParams") & set(HEAVY) == set()


def test_importing_the_command_line_is_light():
    assert loaded_by("import genserve.cli") & set(HEAVY) == set()
    assert "ray" not in loaded_by("import genserve.ar.serve, genserve.core.server.app")
