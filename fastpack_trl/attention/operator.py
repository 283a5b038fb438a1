"""Operators that a compiler does not look into, defined without `torch.library.custom_op`'s checks of every call.

Those checks (aliasing of outputs, wrapping for the compiler) take about 0.1 ms of host time per call, more than the
launch of the kernel inside, three times per layer under checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fastpack"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Register `function` as ``torch.ops.fastpack.<its name>`` for every device, and return that operator.

    Args:
        function: of annotated tensors and constants; returns new tensors and changes none.
        fake: of the same arguments; empty tensors of the shapes, dtypes and strides that `function` returns.
        backward, setup_context: as for `torch.library.register_autograd`; without them the operator has no derivative.
    """
    name = function.__name__
    _library.define(name + torch.library.infer_schema(function, mutates_args=()))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.fastpack, name)
