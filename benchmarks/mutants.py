"""Mutants of a Python file: the same source with one small fault each, for ``mutate.py``.

A fault changes a comparison, an operator, a number, a condition, a call of a pair such as ``min`` and ``max``, or
leaves a statement out. Messages of errors, docstrings, annotations and what only displays (``__repr__``) stay.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil", "left": "right"}
NAMES |= {after: before for before, after in NAMES.items()}
Fault = tuple[str, Callable[[], None], Callable[[], None]]  # what it is, and functions that make and undo it
DISPLAY = {"__repr__", "_repr_html_"}


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, what it is, and the source with it."""

    key: str  # the function and the number of the fault in it
    lines: range  # of the statement
    fault: str
    source: str


@dataclass(frozen=True)
class Unit:
    """A function, or what a module does when it is imported, and its mutants."""

    name: str
    digest: str  # changes with its code, not with comments
    mutants: tuple[Mutant, ...]


def find_units(source: str) -> list[Unit]:
    """The functions of a module with their mutants, in order.

    >>> [(unit.name, [mutant.fault for mutant in unit.mutants]) for unit in find_units("def f(x):\\n    return x + 1")]
    [('f', ['return x + 1: returns None', 'return x + 1: Add -> Sub', 'return x + 1: 1 -> 2'])]
    """
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    faults: dict[str, list[Mutant]] = {}
    for node in ast.walk(tree):
        name = _unit_of(node, parents)
        if name is None or not _is_code(node, parents):
            continue
        for fault, change, undo in _faults(node, parents):
            found = faults.setdefault(name, [])
            statement = _statement(node, parents)
            shown = ast.unparse(statement).splitlines()[0][:100]
            lines = range(statement.lineno, _last_line(statement) + 1)
            found.append(Mutant(f"{name}:{len(found)}", lines, f"{shown}: {fault}", _apply(tree, change, undo)))
    nodes = {_qualified(node, parents): node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return [Unit(name, _digest(nodes.get(name, tree)), tuple(found)) for name, found in faults.items()]


def _apply(tree: ast.Module, change: Callable[[], None], undo: Callable[[], None]) -> str:
    """The source of the module with one change, which is undone."""
    change()
    source = ast.unparse(tree)
    undo()
    return source


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]


def _qualified(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The name of a function with its class; functions within functions belong to the outer one."""
    names = []
    while not isinstance(node, ast.Module):
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.ClassDef):
            names = [node.name, *names]
        node = parents[node]
    return ".".join(names)


def _unit_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    """The function that a node belongs to, ``<module>`` outside; None for what only displays."""
    if isinstance(node, ast.Module):
        return None
    inside = node
    while inside in parents:
        if isinstance(inside, ast.FunctionDef):
            name = _qualified(inside, parents)
            return None if name.rpartition(".")[2] in DISPLAY else name
        inside = parents[inside]
    return "<module>"


def _is_code(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a node can hold a fault: not in the message of an error, a docstring, an annotation or an import."""
    while node in parents:
        parent = parents[node]
        if isinstance(parent, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
            return False
        if isinstance(parent, ast.arg | ast.AnnAssign) and node is getattr(parent, "annotation", None):
            return False
        if isinstance(parent, ast.FunctionDef) and (node is parent.returns or node in parent.decorator_list):
            return False
        if isinstance(parent, ast.ClassDef) and (node in parent.decorator_list or node in parent.bases):
            return False
        if isinstance(parent, ast.Assign) and any(getattr(t, "id", "") in ("__all__", "about") for t in parent.targets):
            return False
        if isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING":
            return False
        node = parent
    return True


def _statement(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node


def _last_line(statement: ast.stmt) -> int:
    """The last line of a simple statement, of the head of a compound one."""
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno


def _faults(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[Fault]:
    """Pairs of a description and functions that make a change to the node and undo it."""
    yield from _operator_faults(node)
    if isinstance(node, ast.Constant):
        yield from _constant_faults(node)
    if isinstance(node, ast.Name | ast.Attribute):
        field = "id" if isinstance(node, ast.Name) else "attr"
        name = getattr(node, field)
        if name in NAMES and isinstance(parents[node], ast.Call) and parents[node].func is node:
            yield _set(node, field, NAMES[name], f"{name} -> {NAMES[name]}")
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield _set(node, "test", negated, f"not ({ast.unparse(node.test)})")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield _set(node, "value", ast.Constant(None), "left out")
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield _set(node, "value", ast.Constant(None), "returns None")
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield _swap(node, "op", OPERATORS)


def _operator_faults(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in COMPARISONS:
                other = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
                yield _set(node, "ops", other, f"{type(op).__name__} -> {type(other[i]).__name__}")
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield _swap(node, "op", OPERATORS)
    if isinstance(node, ast.UnaryOp):
        twice = ast.UnaryOp(node.op, node.operand)  # -(-x), not not x: the opposite
        yield _set(node, "operand", twice, f"without {type(node.op).__name__}")


def _constant_faults(node: ast.Constant) -> Iterator[Fault]:
    value = node.value
    if isinstance(value, bool):
        yield _set(node, "value", not value, f"{value} -> {not value}")
    elif isinstance(value, int):
        yield _set(node, "value", value + 1, f"{value} -> {value + 1}")
    elif isinstance(value, float):
        other = 2 * value if value else 1.0
        yield _set(node, "value", other, f"{value:g} -> {other:g}")
    elif isinstance(value, str) and value in NAMES:
        yield _set(node, "value", NAMES[value], f"{value} -> {NAMES[value]}")


def _swap(node: ast.AST, field: str, pairs: dict[type, Any]) -> Fault:
    before = getattr(node, field)
    after = pairs[type(before)]()
    return _set(node, field, after, f"{type(before).__name__} -> {type(after).__name__}")


def _set(node: ast.AST, field: str, after: object, fault: str) -> Fault:
    before = getattr(node, field)
    return fault, lambda: setattr(node, field, after), lambda: setattr(node, field, before)
