"""Where transformers keeps a family's own attention functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def stock_attention(module: Any, implementation: str) -> Callable[..., tuple[Any, Any]]:
    """The function that an attention module would call under `implementation` (``eager``, ``sdpa``, ...).

    Families define their own eager function beside the module (softcap, sinks) and may override others locally.

    Raises:
        LookupError: the file of the module defines neither; such a model never called the interface.
    """
    for cls in type(module).__mro__:
        home = sys.modules.get(cls.__module__)
        eager = getattr(home, "eager_attention_forward", None)
        interface = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
        if interface is not None:
            function: Callable[..., tuple[Any, Any]] | None
            function = eager if implementation == "eager" else interface.get(implementation, eager)
            if function is not None:
                return function
    raise LookupError(f"{type(module).__name__} defines no attention function for {implementation!r}")
