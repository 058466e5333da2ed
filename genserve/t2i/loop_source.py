"""What the source of a Python loop says: where its body is, and whether it can be the same in each iteration.

A `range` gives real integers, which a body could branch on beyond the few iterations that are traced. So its
variable may only be handed to models as it is. Reads syntax trees; knows nothing of workflows.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

_Span = tuple[tuple[int, int], tuple[int, int]]


class NoSource(Exception):
    """The source file cannot be read, or carries no positions."""


@dataclass(frozen=True)
class ForLoop:
    """A `for` statement and the frame that runs it."""

    node: ast.For
    variable: str | None
    """None unless the target is one name."""
    body: _Span

    def holds(self, frame: FrameType) -> bool:
        """Whether `frame` is at an instruction of the body."""
        at = position(frame)
        return at is not None and self.body[0] <= at[0] and at[1] <= self.body[1]


def position(frame: FrameType) -> _Span | None:
    """Lines and columns of the expression that the frame evaluates; None if its code carries no positions.

    Unlike the offset of the instruction, it is the same before and after the interpreter has specialized a call.
    """
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if positions is None or None in positions:
        return None
    line, end_line, column, end_column = positions
    return (line, column), (end_line, end_column)  # type: ignore[return-value]


def _span(node: Any) -> _Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _tree(frame: FrameType) -> ast.Module:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if not lines:
        raise NoSource
    try:
        return _parsed("".join(lines))
    except SyntaxError as error:
        raise NoSource from error


def ranged_for(frame: FrameType) -> ForLoop | None:
    """The `for ... in range(x):` whose `range(x)` the frame is calling; None if it is anything else.

    Raises `NoSource`.
    """
    at = position(frame)
    if at is None:
        raise NoSource
    for loop in _loops(_tree(frame)):
        call = loop.iter
        if _span(call) == at and isinstance(call, ast.Call) and ast.unparse(call.func) == "range":
            return _for(loop) if len(call.args) == 1 and not call.keywords else None
    return None


def iterating_for(frame: FrameType) -> ForLoop | None:
    """The `for` statement that the frame begins; None if something else iterates. Raises `NoSource`."""
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "GET_ITER":
        return None
    at = position(frame)
    if at is None:
        raise NoSource
    for loop in _loops(_tree(frame)):
        if at in (_span(loop), _span(loop.iter)):  # of the statement in Python 3.11, of the iterable later
            return _for(loop)
    return None


def _loops(tree: ast.Module) -> Iterator[ast.For]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.For))


def _for(node: ast.For) -> ForLoop:
    variable = node.target.id if isinstance(node.target, ast.Name) else None
    return ForLoop(node, variable, (_span(node.body[0])[0], _span(node.body[-1])[1]))


@dataclass(frozen=True)
class Objection:
    line: int
    message: str


def object_to_body(loop: ForLoop) -> Objection | None:
    """Why the iterations may differ, or leave a plain number behind; None if no statement of the body tells."""
    return _leaves_early(loop) or _counts(loop)


def object_to_index(
    loop: ForLoop, frame: FrameType, may_take_index: Callable[[Any], bool]
) -> Objection | None:
    """Why a body that gets its index as a plain number may branch on it; None if it can't.

    `may_take_index` tells whether an object that the body calls records its arguments.
    """
    return _uses_index(loop, frame, may_take_index) or _used_later(loop, frame)


def _leaves_early(loop: ForLoop) -> Objection | None:
    if loop.node.orelse:
        return Objection(loop.node.lineno, "a loop with `else` cannot be compiled")
    for node in _own_statements(loop.node.body):
        if isinstance(node, ast.Break | ast.Return | ast.Continue):
            word = type(node).__name__.lower()
            return Objection(
                node.lineno, f"`{word}` in a loop over a placeholder: each iteration must be the same"
            )
    return None


def _own_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the body, but those that belong to an inner loop or function."""
    for node in body:
        yield node
        if isinstance(node, ast.For | ast.While):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.Return))
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _own_statements(getattr(node, name, []))
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from _own_statements(part.body)


def _counts(loop: ForLoop) -> Objection | None:
    for node in _inside(loop):
        if isinstance(node, ast.AugAssign) or _is_count(node):
            return Objection(
                getattr(node, "lineno", loop.node.lineno),
                f"`{ast.unparse(node)}` in a loop over a placeholder: only values of models are carried",
            )
    return None


def _is_count(node: ast.AST) -> bool:
    """Whether it is such as `k = k + 1`: arithmetic on what the statement assigns."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return False
    assigned = {target.id for target in node.targets if isinstance(target, ast.Name)}
    return any(isinstance(part, ast.Name) and part.id in assigned for part in ast.walk(node.value))


def _inside(loop: ForLoop) -> Iterator[ast.AST]:
    for statement in loop.node.body:
        yield from ast.walk(statement)


def _uses_index(loop: ForLoop, frame: FrameType, may_take_index: Callable[[Any], bool]) -> Objection | None:
    names = {loop.variable}
    aliases = set()
    for node in _inside(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            aliases.add(node.value)
    allowed = {id(alias) for alias in aliases}
    for node in _inside(loop):
        if isinstance(node, ast.Call) and may_take_index(_called(node.func, frame)):
            given = (*node.args, *(keyword.value for keyword in node.keywords))
            allowed |= {id(item) for arg in given for item in (arg, *getattr(arg, "elts", ()))}
    for node in _inside(loop):
        if not isinstance(node, ast.Name) or node.id not in names:
            continue
        if isinstance(node.ctx, ast.Store) and node.id == loop.variable:
            return Objection(node.lineno, f"the loop's variable {node.id!r} is assigned in its body")
        if isinstance(node.ctx, ast.Load) and id(node) not in allowed:
            return Objection(
                node.lineno,
                f"{node.id!r}, an index of `range` over a placeholder, may only be given to a model as it is: "
                "nothing else would be the same in each iteration",
            )
    return None


def _called(function: ast.expr, frame: FrameType) -> Any:
    """The object that an expression names, as far as names and attributes go."""
    if isinstance(function, ast.Name):
        for scope in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if function.id in scope:
                return scope[function.id]
        return None
    if isinstance(function, ast.Attribute):
        return getattr(_called(function.value, frame), function.attr, None)
    return None


def _used_later(loop: ForLoop, frame: FrameType) -> Objection | None:
    """A use of the variable behind the loop, where it would be the number of the last traced iteration."""
    end = _span(loop.node)[1]
    function = _scope(_tree(frame), loop.node)
    found = sorted(
        (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == loop.variable),
        key=lambda node: (node.lineno, node.col_offset),
    )
    for node in found:
        if (node.lineno, node.col_offset) < end:
            continue
        if not isinstance(node.ctx, ast.Load):
            return None
        return Objection(node.lineno, f"{node.id!r}, the variable of a loop, is used after the loop")
    return None


def _scope(tree: ast.Module, loop: ast.For) -> ast.AST:
    scope: ast.AST = tree
    for node in ast.walk(tree):  # outer functions come before inner ones
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            _span(node)[0] <= _span(loop)[0] and _span(loop)[1] <= _span(node)[1]
        ):
            scope = node
    return scope
