"""The scan of Mamba-2 (state space duality) over a packed row."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.decay import log_decay, masked_exp


def packed_ssd(x: Tensor, a: Tensor, b: Tensor, c: Tensor, chunks: Chunks) -> Tensor:
    """Return ``y_t = c_t S_t`` with ``S_t = exp(a_t) S_(t-1) + b_t x_t``, a state of 0 at the start of each document.

    Inside of chunks it is a masked product, ``((C B^T) D) x``. The states at the ends of chunks reach those after by
    one triangular product over chunks: no loop, whatever the lengths.

    Args:
        x: (total_tokens, heads, head size), times its time step.
        a: (total_tokens, heads), the logarithm of the decay.
        b, c: (total_tokens, groups, state size); a group serves ``heads / groups`` heads.
        chunks: of the row.

    Returns:
        (total_tokens, heads, head size) in fp32, or float64 if `x` is.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    groups = b.shape[1]
    per_group = x.shape[1] // groups
    values = chunks.split(x, dtype).unflatten(1, (groups, per_group))
    into, out_of = (chunks.split(tensor, dtype)[:, :, None] for tensor in (b, c))
    sums = log_decay(chunks.split(a[..., None], dtype)[..., 0], chunks).unflatten(1, (groups, per_group))
    between = masked_exp(sums[..., :, None] - sums[..., None, :], chunks.causal[:, None, None], dtype)
    last = sums[..., -1]
    to_end = masked_exp(last[..., None] - sums, chunks.to_end[:, None, None], dtype)
    carried = masked_exp(sums, chunks.carry_in[:, None, None], dtype)

    inside = ((out_of @ into.mT) * between) @ values
    added = (into * to_end[..., None]).mT @ values  # (chunks, groups, per group, state size, head size)
    states = _chunk_product(last.flatten(1), chunks, dtype) @ added.flatten(1, 2).flatten(2).transpose(0, 1)
    entering = states.transpose(0, 1).unflatten(1, (groups, per_group)).unflatten(-1, added.shape[-2:])
    return chunks.join((inside + (out_of * carried[..., None]) @ entering).flatten(1, 2))


def _chunk_product(last: Tensor, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """Return (heads, chunks, chunks): by how much the state at the end of chunk m has decayed where chunk n begins.

    Args:
        last: (chunks, heads) float64, the logarithm of the decay over each chunk, of the document that it ends with.
    """
    entering = chunks.chain.double() @ last  # since the document began, up to the start of each chunk
    at_end = F.pad(entering[1:], (0, 0, 0, 1))
    return masked_exp(entering.T[:, :, None] - at_end.T[:, None, :], chunks.chain, dtype)
