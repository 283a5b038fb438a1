"""Stock's attention of a model: its name, and the function of its family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Our name over each of stock's: what we hand over to must be known without looking it up per model. Names with
# "flash", "sdpa" or "flex_attention" in them would trigger transformers' checks for those kernels.
OVER = {
    "eager": "fastpack_over_eager",
    "sdpa": "fastpack_over_torch",
    "flash_attention_2": "fastpack_over_fa2",
    "flash_attention_3": "fastpack_over_fa3",
    "flash_attention_4": "fastpack_over_fa4",
    "flex_attention": "fastpack_over_flex",
}
_UNDER = {ours: stock for stock, ours in OVER.items()}


def stock_implementation(config: Any) -> str:
    """Return stock's implementation of a text config, e.g. ``sdpa``, also while ours is registered over it."""
    name = str(config._attn_implementation)
    return _UNDER.get(name, name)


def stock_attention(module: Any, implementation: str) -> Callable[..., tuple[Any, Any]]:
    """Return the function that an attention module would call under `implementation` (``eager``, ``sdpa``, ...).

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
