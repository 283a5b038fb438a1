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
