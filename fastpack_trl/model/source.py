"""What is read from the source of forwards."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache
from typing import Any


def source_tree(function: Any) -> ast.Module | None:
    """Return the parsed source of a function; None where there is none (frozen applications, interactive classes)."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


@lru_cache(maxsize=256)
def hands_on_kwargs(parent: Any, child: str) -> bool:
    """Return whether `parent.forward` calls ``self.<child>(..., **kwargs)``; True where the call is spelt otherwise.

    Of several calls those count that name a keyword: nemotron_h calls an MLP in the same place by ``self.mixer(x)``.
    """
    tree = source_tree(parent.forward)
    calls = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{child}"
    ]
    calls = [node for node in calls if node.keywords] or calls
    return all(any(keyword.arg is None for keyword in node.keywords) for node in calls)


_BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp, ast.comprehension, ast.ListComp,
    ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda, ast.FunctionDef, ast.With,
)  # fmt: skip


@lru_cache(maxsize=256)
def children_of_one_input(parent: Any, children: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """Return which of `children` are called by ``parent.forward`` with one variable: all of a group, or none of it.

    That is: ``self.<child>(x)`` once for each, with the same ``x`` and nothing beside it, under the same conditions,
    and nothing between the first and the last call assigns ``x`` or leaves. Groups of two or more, in order of calls.
    """
    tree = source_tree(parent.forward)
    groups: dict[Any, list[tuple[tuple[int, int], str]]] = {}
    calls, stores, exits = _walked(tree) if tree is not None else ([], [], [])
    names = [name for _, name, _, _ in calls]
    for place, name, variable, path in calls:
        if name in children and variable is not None and names.count(name) == 1:
            groups.setdefault((variable, path), []).append((place, name))
    found = []
    for (variable, _), members in groups.items():
        first, last = members[0][0], members[-1][0]
        broken = any(first < place < last for place in exits)
        broken = broken or any(first < place < last for place, stored in stores if stored == variable)
        if len(members) > 1 and not broken:
            found.append(tuple(name for _, name in members))
    return tuple(found)


def _walked(tree: ast.Module) -> tuple[list[Any], list[Any], list[tuple[int, int]]]:
    """Return calls of ``self.<name>`` (place, name, variable or None, branches), stored names, and exits, in order.

    A name is stored, and a function left, at the end of the statement that does so.
    """
    calls: list[Any] = []
    stores: list[Any] = []
    exits: list[tuple[int, int]] = []
    # The function itself is no branch. A branch has parts (`body`, `orelse`), which exclude each other.
    pending: list[tuple[ast.AST, tuple[Any, ...], Any]] = [
        (each, (), None) for each in getattr(tree.body[0], "body", [])
    ]
    while pending:
        node, path, statement = pending.pop()
        if isinstance(node, ast.stmt | ast.NamedExpr):
            statement = (node.end_lineno, node.end_col_offset)
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, arguments = node.func.value, node.args
            if isinstance(owner, ast.Name) and owner.id == "self":
                alone = len(arguments) == 1 and not node.keywords and isinstance(arguments[0], ast.Name)
                calls.append((place, node.func.attr, ast.unparse(arguments[0]) if alone else None, path))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stores.append((statement, node.id))
        elif isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
            exits.append(statement)
        for part, value in ast.iter_fields(node):
            inside = (*path, (*place, part)) if isinstance(node, _BRANCHES) else path
            values = value if isinstance(value, list) else [value]
            pending += [(each, inside, statement) for each in values if isinstance(each, ast.AST)]
    return sorted(calls, key=lambda call: call[0]), stores, exits
