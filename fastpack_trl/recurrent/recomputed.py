"""Operators that save only their inputs: backward recomputes forward and differentiates it by autograd.

A graph gets one node forward and one backward. Intermediate results of a scan are ten times as large as its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import differentiable, operator, recording


def recomputed(
    function: Callable[..., Tensor], arguments: str, *, inputs: int, fake: Callable[..., Tensor],
    flops: Callable[..., int], gradient: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """Register `function` as ``torch.ops.fastpack.<its name>``, with autograd's gradient of it; return the operator.

    Both passes run without autocast, and with matmuls in TF32 if the first argument has 16 bits.

    Args:
        function: returns a new tensor of any strides; differentiable by autograd, in a backward pass too.
        arguments: those of its signature: ``Tensor x, Tensor? bias, int n``.
        inputs: number of leading tensors that get a gradient.
        fake, flops: as of `operator`; the backward pass counts as three forward passes, one of them the recomputation.
        gradient: of the output's gradient and the arguments, the gradients of the inputs; default: autograd's.
    """
    name = function.__name__

    def forward(*fields: Any) -> Tensor:
        with scan_precision(fields[0]):
            return function(*fields).contiguous()

    def backward(grad: Tensor, *fields: Any) -> tuple[Tensor, ...]:
        with scan_precision(fields[0]):
            if gradient is not None:
                return tuple(each.contiguous() for each in gradient(grad, *fields))
            with recording():
                leaves = [None if field is None else field.detach().requires_grad_() for field in fields[:inputs]]
                out = function(*leaves, *fields[inputs:])
            grads = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad))
        # An operator can return only tensors, so an input that is None gets an empty one.
        return tuple(grad.new_empty(0) if leaf is None else next(grads).contiguous() for leaf in leaves)

    def fake_backward(grad: Tensor, *fields: Any) -> tuple[Tensor, ...]:
        like = partial(torch.empty_like, memory_format=torch.contiguous_format)
        return tuple(grad.new_empty(0) if field is None else like(field) for field in fields[:inputs])

    results = ", ".join(["Tensor"] * inputs)
    signature = f"({arguments}) -> Tensor"
    run = operator(forward, fake=fake, flops=flops, signature=signature, name=f"{name}_forward")
    run_backward = operator(
        backward, fake=fake_backward, flops=lambda _grad, *fields, **_keywords: 3 * flops(*fields),
        signature=f"(Tensor grad, {arguments}) -> ({results})", name=f"{name}_backward",
    )  # fmt: skip

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *fields: Any) -> Tensor:
            ctx.save_for_backward(*(field if isinstance(field, Tensor) else None for field in fields))
            ctx.constants = [None if isinstance(field, Tensor) else field for field in fields]
            return cast("Tensor", run(*fields))

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            pairs = zip(ctx.saved_tensors, ctx.constants, strict=True)
            fields = [constant if tensor is None else tensor for tensor, constant in pairs]
            grads = zip(run_backward(grad, *fields), fields, strict=False)
            return *(None if field is None else each for each, field in grads), *[None] * (len(fields) - inputs)

    return cast("Callable[..., Tensor]", differentiable(name, signature, Recomputed))


@contextlib.contextmanager
def scan_precision(tensor: Tensor) -> Iterator[None]:
    """Run fp32 matmuls in fp32 under autocast too, as TRL's models do; on CUDA in TF32 if `tensor` has 16 bits.

    A 16-bit layer rounds the inputs and the output of a scan to far fewer bits.
    """
    rounded = fp32_matmuls("tf32") if tensor.dtype.itemsize == 2 else contextlib.nullcontext()
    with torch.autocast(tensor.device.type, enabled=False), rounded:
        yield


@contextlib.contextmanager
def fp32_matmuls(precision: str) -> Iterator[None]:
    """Set how CUDA multiplies fp32 matrices, ``"tf32"`` or ``"ieee"``; restored on exit."""
    matmul, whole = torch.backends.cuda.matmul, torch.backends
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        # "none" follows the setting for all of torch, also if that changes later.
        matmul.fp32_precision = "none" if before == whole.fp32_precision else before
