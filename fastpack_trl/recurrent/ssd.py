"""The scan of Mamba-2 (state space duality) over a packed row.

Within a chunk it is a masked matmul, ``((C B^T) D) x``. States at the ends of chunks reach later chunks by one
triangular matmul over chunks, without a loop.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.kernels.operators import arguments_of
from fastpack_trl.model.facts import Scan
from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.decay import differences, log_decay, masked_exp
from fastpack_trl.recurrent.recomputed import recomputed


def mamba2(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, *fields: Any) -> Tensor:
    """Compute `packed_ssd` from the fields of `Chunks`."""
    chunks, dtype, groups = Chunks(*fields), torch.promote_types(x.dtype, torch.float32), b.shape[1]
    # Letters of `einsum`: chunks n and m, groups g, heads of a group h, tokens i and j, state size k, head size p.
    inputs, steps = (chunks.split(part, dtype).unflatten(1, (groups, -1)) for part in (x, step[..., None]))
    into, out_of = (chunks.split(part, dtype) for part in (b, c))
    sums = log_decay(step.double() * a.double(), chunks).unflatten(1, (groups, -1))
    over_chunk = sums[..., -1]
    values = inputs * steps

    scores = (out_of @ into.mT)[:, :, None] * differences(sums, chunks.causal[:, None, None], dtype)
    to_end = masked_exp(over_chunk[..., None] - sums, chunks.to_end[:, None, None], dtype)
    added = torch.einsum("ngjk,nghjp->ghnkp", into, values * to_end[..., None])
    # From the start of the document that enters chunk n: up to that chunk, and up to the end of chunk m.
    entering = torch.einsum("nm,mgh->ghn", chunks.chain.double(), over_chunk)
    at_end = F.pad(entering[..., 1:], (0, 1))
    decays = masked_exp(entering[..., :, None] - at_end[..., None, :], chunks.chain, dtype)
    states = torch.einsum("ghnm,ghmkp->nghkp", decays, added)
    carried = masked_exp(sums, chunks.carry_in[:, None, None], dtype)
    out = scores @ values + torch.einsum("ngik,nghkp->nghip", out_of, states) * carried[..., None]
    if skip is not None:
        out = out + skip.to(dtype).view(groups, -1, 1, 1) * inputs
    return chunks.join(out.flatten(1, 2))


def _like_output(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)


def _flops(x: Tensor, _step: Tensor, _a: Tensor, b: Tensor, *_: Any, **_keywords: Any) -> int:
    """Count the matmuls but for the one over chunks, which is small."""
    return int(x.shape[0] * Scan("Mamba-2", b.shape[1], x.shape[1], b.shape[2], x.shape[2]).flops(CHUNK))


_ARGUMENTS = "Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor? skip, " + arguments_of(Chunks)
_mamba2 = recomputed(mamba2, _ARGUMENTS, inputs=6, fake=_like_output, flops=_flops)


def packed_ssd(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: Chunks, *, skip: Tensor | None = None
) -> Tensor:
    """Return ``y_t = c_t S_t + skip x_t``, ``S_t = exp(a step_t) S_(t-1) + step_t b_t x_t``, from 0 in each document.

    Args:
        x: (total_tokens, heads, head size).
        step: (total_tokens, heads).
        a: (heads,), at most 0.
        b, c: (total_tokens, groups, state size); a group serves ``heads / groups`` heads.
        skip: (heads,).

    Returns:
        (total_tokens, heads, head size) in fp32, computed with matmuls in TF32 on CUDA if `x` has 16 bits; in float64
        if `x` is.
    """
    return _mamba2(x, step, a, b, c, skip, *chunks)
