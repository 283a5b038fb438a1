"""Outputs that transformers' hooks record inside of a layer (router logits), in a form that can be compiled.

A hook appends to a list that it finds through a context variable, which torch cannot trace. transformers' own variable
becomes a plain attribute while something is compiled; here it holds a dictionary of this one layer, and what was
recorded leaves the compiled function as outputs.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

try:
    _active: Any = importlib.import_module("transformers.utils.output_capturing")._active_collector
except (ImportError, AttributeError):  # recorded in another way: such a layer is compiled if torch can trace it
    _active = None

# Recorded inside of a layer; layers and attentions themselves are recorded around the compiled function.
KNOWN = frozenset({"router_logits"})

Recorded = dict[str, list[Any]]


def asked_for() -> tuple[str, ...]:
    """Return what the model's caller wants recorded, e.g. ``("router_logits",)``."""
    collector = _active.get() if _active is not None else None
    return tuple(collector) if collector else ()


def hand_over(recorded: Recorded) -> None:
    """Give what a compiled layer recorded to the model's caller."""
    if recorded:
        collector = _active.get()
        for name, values in recorded.items():
            collector[name].extend(values)


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Keep outputs of layers that run in this context out of the model's output."""
    if _active is None:
        yield
        return
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def recording(names: tuple[str, ...], run: Callable[..., Any], *args: Any) -> tuple[Any, Recorded]:
    """Return ``run(*args)`` and what was recorded in it. Only in graphs: else other threads see the dictionary."""
    recorded: Recorded = {name: [] for name in names}
    if _active is None:
        return run(*args), recorded
    token = _active.set(recorded)
    out = run(*args)
    _active.reset(token)
    return out, recorded
