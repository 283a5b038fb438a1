"""The scan of Mamba-2 (state space duality) over a packed row, as operators: one node of a graph forward, one backward.

Inside of chunks it is a masked product, ``((C B^T) D) x``. The states at the ends of chunks reach those after by one
triangular product over chunks: no loop, whatever the lengths. What is kept for backward is what a layer gives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.operators import arguments_of, differentiable, operator
from fastpack_trl.model.mixers import Scan
from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.decay import differences, log_decay, log_decay_gradient, masked_exp
from fastpack_trl.recurrent.precision import no_autocast, rounds_anyway, tensor_cores


class _Scan:
    """One call: what its products are made of, (chunks, groups, heads per group, CHUNK, ...), in fp32 or wider."""

    def __init__(
        self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, chunks: Chunks
    ) -> None:
        self.dtype, groups = torch.promote_types(x.dtype, torch.float32), b.shape[1]
        self.chunks, self.tf32 = chunks, rounds_anyway(x.dtype)
        self._x, self._step = (
            chunks.split(part, self.dtype).unflatten(1, (groups, -1)) for part in (x, step[..., None])
        )
        self._skip = None if skip is None else skip.to(self.dtype).view(groups, -1, 1, 1)
        self._values = self._x * self._step
        self._into, self._out_of = (chunks.split(part, self.dtype)[:, :, None] for part in (b, c))
        self._rates, self._rate = step, a
        sums = log_decay(step.double() * a.double(), chunks).unflatten(1, (groups, -1))
        self._between = differences(sums, chunks.causal[:, None, None], self.dtype)
        last = sums[..., -1]
        self._to_end = masked_exp(last[..., None] - sums, chunks.to_end[:, None, None], self.dtype)[..., None]
        self._carried = masked_exp(sums, chunks.carry_in[:, None, None], self.dtype)[..., None]
        entering = chunks.chain.double() @ last.flatten(1)  # since the document began, up to the start of each chunk
        at_end = F.pad(entering[1:], (0, 0, 0, 1))
        # (heads, chunks n, chunks m): by how much the state at the end of m has decayed where n begins
        self._over = masked_exp(entering.T[:, :, None] - at_end.T[:, None, :], chunks.chain, self.dtype)
        with tensor_cores(self.tf32):
            self._scores = (self._out_of @ self._into.mT) * self._between
            self._kept, self._read = self._into * self._to_end, self._out_of * self._carried
            self._states = self._spread(self._over, self._kept.mT @ self._values)

    def _spread(self, over: Tensor, states: Tensor) -> Tensor:
        """Return the product over chunks of states (chunks, groups, heads per group, state size, head size)."""
        spread = over @ _heads_first(states)
        return spread.unflatten(2, states.shape[-2:]).transpose(0, 1).unflatten(1, states.shape[1:3]).contiguous()

    def output(self) -> Tensor:
        with tensor_cores(self.tf32):
            out = (self._scores @ self._values).add_(self._read @ self._states)
        if self._skip is not None:
            out.addcmul_(self._skip, self._x)
        return self.chunks.join(out.flatten(1, 2))

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = self.chunks.split(grad, self.dtype).view_as(self._x)
        with tensor_cores(self.tf32):
            entering = self._read.mT @ given
            added = self._spread(self._over.mT, entering)
            scores = given @ self._values.mT
            values = (self._scores.mT @ given).add_(self._kept @ added)
            read, kept = given @ self._states.mT, self._values @ added.mT
            over = _heads_first(entering) @ _heads_first(self._kept.mT @ self._values).mT
            # Logarithms of decays: what a product has as value times its gradient, plus at i and minus at j.
            of_scores = scores * self._scores
            both = scores.mul_(self._between).sum(2)
            into, out_of = self._into[:, :, 0], self._out_of[:, :, 0]
            to_c = (both @ into).add_((read * self._carried).sum(2))
            to_b = (both.mT @ out_of).add_((kept * self._to_end).sum(2))
        ended = kept.mul_(self._kept).sum(-1)
        logs = of_scores.sum(-1).sub_(of_scores.sum(-2)).add_(read.mul_(self._read).sum(-1)).sub_(ended)
        logs[..., -1] += ended.sum(-1) + self._over_gradient(over.mul_(self._over)).view_as(ended[..., 0])
        rates = log_decay_gradient(logs.flatten(1, 2), self.chunks)
        x = values * self._step
        to_skip = None
        if self._skip is not None:
            x.addcmul_(self._skip, given)
            to_skip = (given * self._x).sum((0, 3, 4)).flatten()
        step = self.chunks.join((values * self._x).sum(-1, keepdim=True).flatten(1, 2))[..., 0] + rates * self._rate
        join = self.chunks.join
        return join(x.flatten(1, 2)), step, (rates * self._rates).sum(0), join(to_b), join(to_c), to_skip

    def _over_gradient(self, over: Tensor) -> Tensor:
        """Return the gradient of the logarithms of the decays over whole chunks, (chunks, heads)."""
        begun, ended = over.double().sum(2).T, over.double().sum(1).T
        begun[1:] -= ended[:-1]
        return (self.chunks.chain.double().T @ begun).to(self.dtype)


def _heads_first(states: Tensor) -> Tensor:
    """Return (chunks, groups, heads per group, ...) as (heads, chunks, all the rest)."""
    return states.flatten(1, 2).flatten(2).transpose(0, 1)


_ROW = "Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor? skip, " + arguments_of(Chunks)
_GIVEN = 6


def mamba2_forward(*arguments: Any) -> Tensor:
    with no_autocast(arguments[0]):
        return _of(arguments).output()


def mamba2_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    with no_autocast(grad):
        found = _of(arguments).gradients(grad)
    # An operator returns tensors alone: an empty one for a skip that is not there.
    return tuple(
        grad.new_empty(0) if part is None else part.to(given.dtype)
        for part, given in zip(found, arguments, strict=False)
    )


def _of(arguments: tuple[Any, ...]) -> _Scan:
    x, step, a, b, c, skip = arguments[:_GIVEN]
    return _Scan(x, step, a, b, c, skip, Chunks(*arguments[_GIVEN:]))


def _like_x(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)


def _like_row(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        grad.new_empty(0) if part is None else torch.empty_like(part, memory_format=torch.contiguous_format)
        for part in arguments[:_GIVEN]
    )


def _flops(x: Tensor, _step: Tensor, _a: Tensor, b: Tensor, *_: Any, **_keywords: Any) -> int:
    """Count the products of a forward; those over chunks are few."""
    return int(x.shape[0] * Scan("Mamba-2", b.shape[1], x.shape[1], b.shape[2], x.shape[2]).flops(CHUNK))


def _backward_flops(_grad: Tensor, *arguments: Any, **_keywords: Any) -> int:
    return 3 * _flops(*arguments)  # once to make it again


_forward = operator(mamba2_forward, fake=_like_x, flops=_flops, signature=f"({_ROW}) -> Tensor")
_backward = operator(
    mamba2_backward, fake=_like_row, flops=_backward_flops,
    signature=f"(Tensor grad, {_ROW}) -> ({', '.join(['Tensor'] * _GIVEN)})",
)  # fmt: skip


class _Mamba2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:-1])
        ctx.longest = arguments[-1]
        out: Tensor = _forward(*arguments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = _backward(grad, *saved, ctx.longest)
        skip = None if saved[_GIVEN - 1] is None else found[-1]
        return (*found[:-1], skip, *(None for _ in Chunks._fields))


_mamba2 = differentiable("mamba2", f"({_ROW}) -> Tensor", _Mamba2)


def packed_ssd(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: Chunks, *, skip: Tensor | None = None
) -> Tensor:
    """Return ``y_t = c_t S_t + skip x_t``, ``S_t = exp(a step_t) S_(t-1) + step_t b_t x_t``, from 0 in each document.

    Args:
        x: (total_tokens, heads, head size).
        step: (total_tokens, heads).
        a: (heads,), at most 0.
        b, c: (total_tokens, groups, state size); a group serves ``heads / groups`` heads.
        chunks: of the row.
        skip: (heads,).

    Returns:
        (total_tokens, heads, head size) in fp32, computed with products in TF32 on CUDA if `x` is of 16 bits; in
        float64 if `x` is.
    """
    out: Tensor = _mamba2(x, step, a, b, c, skip, *chunks)
    return out
