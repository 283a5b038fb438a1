"""Operators that a compiler does not trace, without Python between a compiled graph and the kernel.

`torch.library.custom_op` checks every call, and the Python wrapper of `register_autograd` runs in compiled graphs too,
where nothing is differentiated: 5 to 20 us of host time per call, as much as a launch. So an operation with a
derivative consists of two operators here. The inner one has a kernel, a fake kernel and a FLOP formula, and
no derivative. The outer one is a `torch.autograd.Function` under an operator's name and is resolved while a graph is
traced, so that the graph holds and calls the inner one.

The function needs an operator's name because a compiled checkpoint (torch 2.11) keeps the results of an autograd
function instead of recomputing them. Results of an operator are recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "fastpack"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCHEMA = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", bool: "bool", str: "str",
    torch.dtype: "ScalarType",
}  # fmt: skip


def arguments_of(fields: type[Any], prefix: str = "") -> str:
    """Return the annotated fields of a class as arguments of a signature: ``Tensor query, Tensor? sinks, float scale``.

    An operator takes tensors and constants separately, while Python code passes a named tuple of them. With a `prefix`
    before each name, a signature can contain them twice.
    """
    return ", ".join(f"{_SCHEMA[kind]} {prefix}{name}" for name, kind in get_type_hints(fields).items())


def operator(
    function: Callable[..., Any], *, fake: Callable[..., Any], flops: Callable[..., int], signature: str, name: str = ""
) -> Any:
    """Register `function` as ``torch.ops.fastpack.<name>`` for every device, without a derivative; return it.

    Args:
        function: returns new tensors and changes none; called without gradients.
        fake: of the same arguments; empty tensors of the shapes, dtypes and strides that `function` returns.
        flops: of the same arguments and the keyword `out_val`; the floating-point operations of one call. Without
            it the partitioner of a compiled graph would count the operator as free to run twice.
        signature: ``(Tensor x, int n) -> Tensor``.
        name: default: the function's name.
    """
    name = name or function.__name__
    _library.define(name + signature)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    packet = getattr(torch.ops.fastpack, name)
    register_flop_formula(packet, get_raw=True)(flops)
    return packet.default


def differentiable(name: str, signature: str, function: type[torch.autograd.Function]) -> Any:
    """Register ``function.apply`` as ``torch.ops.fastpack.<name>``, which no traced graph contains; return it.

    Args:
        name: of the operator.
        signature: as for `operator`.
        function: its forward and its backward call operators without a derivative.
    """

    def apply(*args: Any) -> Any:
        return function.apply(*args)

    _library.define(name + signature)
    # Composite: the dispatcher replaces it by the operators that it calls, above autograd, fake tensors and modes.
    _library.impl(name, apply, "CompositeImplicitAutograd")
    return getattr(torch.ops.fastpack, name).default


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record operations in a backward pass, also inside the kernel of an operator.

    Under a dispatch mode (a FLOP counter, say) torch runs kernels without autograd.
    """
    without, key = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with torch.enable_grad(), without(key.AutogradFunctionality, False), without(key.ADInplaceOrView, False):
        yield
