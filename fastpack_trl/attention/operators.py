"""What the backends with a kernel share: an operator with a gradient, and sinks on kernels that know none.

A sink is one logit per head that takes part in the softmax and has no value (gpt-oss). It adds ``exp(sink)`` to the
denominator of each row and nothing to the sum, so with ``lse' = logaddexp(lse, sink)`` the output is
``out' = out * exp(lse - lse')``. The backward of the unchanged kernel computes ``exp(scores - lse')`` and
``rowsum(dout * out')``: given `out'` and `lse'` in place of `out` and `lse` it returns exact dQ, dK and dV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.kernels.operators import arguments_of, differentiable, operator

HEAD_ALIGNMENT = 8
_OF_TOKENS = 5
"""The first fields: query, key, value, cu_seqlens, sinks."""


def attention_operator(
    inputs: type[Any],
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    *,
    fake: Callable[..., tuple[Tensor, Tensor]],
    flops: Callable[..., int],
    flops_backward: Callable[..., int],
    on_host: tuple[str, ...] = (),
    memory_format: torch.memory_format = torch.preserve_format,
) -> Any:
    """Register two operators and their gradient; return ``(*inputs) -> (out, log-sum-exp)``, the latter without one.

    Args:
        inputs: a named tuple: ``query, key, value, cu_seqlens, sinks``, then tensors and constants without a gradient.
        forward: of the fields of `inputs`; returns output and log-sum-exp.
        backward: of ``grad_out, out, lse, *inputs``; returns the gradients of query, key, value and sinks.
        fake: as `forward`, with empty tensors.
        flops, flops_backward: of the arguments of `forward` and `backward`.
        on_host: tensors that stay on the host. They are not saved: hooks on saved tensors need not move them.
        memory_format: of the gradients that `backward` returns.
    """

    def fake_backward(grad_out: Tensor, _out: Tensor, _lse: Tensor, *fields: Any) -> tuple[Tensor, ...]:
        sinks = fields[4]
        gradients = [torch.empty_like(tensor, memory_format=memory_format) for tensor in fields[:3]]
        return *gradients, grad_out.new_empty(0) if sinks is None else torch.empty_like(sinks)

    arguments, hints = arguments_of(inputs), get_type_hints(inputs)
    saved = [i for i, name in enumerate(hints) if hints[name] in (Tensor, Tensor | None) and name not in on_host]
    run = operator(forward, fake=fake, flops=flops, signature=f"({arguments}) -> (Tensor, Tensor)")
    run_backward = operator(
        backward, fake=fake_backward, flops=flops_backward,
        signature=f"(Tensor grad_out, Tensor out, Tensor lse, {arguments}) -> (Tensor, Tensor, Tensor, Tensor)",
    )  # fmt: skip

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
            out, lse = run(*fields)
            ctx.rest = {i: field for i, field in enumerate(fields) if i not in saved}
            ctx.save_for_backward(out, lse, *(fields[i] for i in saved))
            ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
            out, lse, *tensors = ctx.saved_tensors
            fields = dict(zip(saved, tensors, strict=True)) | ctx.rest
            ordered = [fields[i] for i in range(len(hints))]
            dq, dk, dv, dsinks = run_backward(grad_out.contiguous(), out, lse, *ordered)
            return dq, dk, dv, None, None if fields[4] is None else dsinks, *(None,) * (len(hints) - _OF_TOKENS)

    name = f"{forward.__name__}_with_gradient"
    return differentiable(name, f"({arguments}) -> (Tensor, Tensor)", Attention)


def fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the sinks, if there are any, in the denominator.

    Args:
        out: (..., tokens, heads, head_dim), of a kernel without sinks; overwritten.
        lse: (..., heads, tokens), natural logarithm.
        sinks: (heads,).
    """
    if sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out *= torch.exp(lse - with_sink).transpose(-1, -2)[..., None].to(out.dtype)
    return out, with_sink


def sink_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return ``-sum(exp(sink - lse') * rowsum(dout * out'))`` per head; an empty tensor if there are no sinks.

    Args:
        grad_out, out: (..., tokens, heads, head_dim), as `fold_sinks` returned it.
        lse: (..., heads, tokens), as `fold_sinks` returned it.
        sinks: (heads,).
    """
    if sinks is None:
        return grad_out.new_empty(0)
    delta = (grad_out.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
    weighted = torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return -weighted.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)


def tokens_of(call: AttentionCall) -> list[Tensor]:
    """Return query, key and value as kernels over a whole row take them: (total_tokens, heads, head_dim).

    Their head_dim is one, a multiple of 8.
    """
    width = -(-max(call.query.shape[-1], call.value.shape[-1]) // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
    tokens = [pad_head(tensor[0].transpose(0, 1), width) for tensor in (call.query, call.key, call.value)]
    # The kernel's results have the strides of its inputs, a graph expects rows one after the other. There the kernel
    # that writes them (rotary embedding) writes them so; eager it would be a copy, and is not needed.
    return [tensor.contiguous() for tensor in tokens] if torch.compiler.is_compiling() else tokens


def gather_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return (keys, heads, head_dim): the tokens of each key, some more than once."""
    return tensor.index_select(0, index)


def add_rows(grad: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Return (tokens, heads, head_dim): the sum over the copies of each token, made in fp32.

    Of two copies, as a prompt of a pair has, any order gives the same sum; of more, the order on CUDA is that of atomic
    additions unless `torch.use_deterministic_algorithms` is on.
    """
    exact = torch.promote_types(grad.dtype, torch.float32)
    return grad.new_zeros(tokens, *grad.shape[1:], dtype=exact).index_add_(0, index, grad.to(exact)).to(grad.dtype)


def _registered() -> Any:
    run = operator(
        gather_rows, fake=lambda tensor, index: tensor.new_empty(index.shape[0], *tensor.shape[1:]),
        flops=lambda *_fields, **_keywords: 1,
    )  # fmt: skip
    run_backward = operator(
        add_rows, fake=lambda grad, _index, tokens: grad.new_empty(tokens, *grad.shape[1:]),
        flops=lambda *_fields, **_keywords: 1, signature="(Tensor grad, Tensor index, SymInt tokens) -> Tensor",
    )  # fmt: skip

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:
            ctx.tokens = tensor.shape[0]
            ctx.save_for_backward(index)
            gathered: Tensor = run(tensor, index)
            return gathered

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return run_backward(grad, *ctx.saved_tensors, ctx.tokens), None

    return differentiable("gather_keys", "(Tensor tensor, Tensor index) -> Tensor", Gather)


gather_keys = _registered()
"""`gather_rows` with `add_rows` as its gradient: one function for eager and compiled layers."""


def pad_head(tensor: Tensor, width: int) -> Tensor:
    """Append zeros to the last dimension up to `width`: they change no score, and no value before them."""
    return F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor
