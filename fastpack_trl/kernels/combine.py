"""Sums over the routed slots of each token, as gathers.

A token has k slots; sorted by expert they lie anywhere. Nothing is accumulated by index: `index_put(accumulate=True)`
would sort again on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.kernels._triton import runs_triton


def combine(
    rows_sh: Tensor, inverse_tk: Tensor, weights_tk: Tensor | None = None, *, more_sh: Tensor | None = None,
    bias_eh: Tensor | None = None, ids_tk: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return per token the sum over its k slots of ``weight * (row + more + bias)``, accumulated in fp32.

    Args:
        rows_sh: (S, H), rows sorted by expert.
        inverse_tk: (T, k) int32, position of slot (t, j) among the rows.
        weights_tk: (T, k) routing weights; 1 where None.
        more_sh: (S, H), a second addend of each row, such as that of LoRA.
        bias_eh: (E, H), bias of the down projection, with `ids_tk`.
        ids_tk: (T, k), expert of each slot.
        dtype: of the result; default that of the rows.

    Returns:
        (T, H).
    """
    if runs_triton(rows_sh, weights_tk, more_sh, bias_eh):
        from fastpack_trl.kernels.combine_triton import combine_triton

        return combine_triton(
            rows_sh, inverse_tk, weights_tk, more_sh=more_sh, bias_eh=bias_eh, ids_tk=ids_tk, dtype=dtype
        )
    wide = torch.promote_types(rows_sh.dtype, torch.float32)
    scale = None if weights_tk is None else weights_tk.to(wide)
    rows = rows_sh.to(wide) if more_sh is None else rows_sh.to(wide) + more_sh
    out = F.embedding_bag(inverse_tk, rows, per_sample_weights=scale, mode="sum")
    if bias_eh is not None and ids_tk is not None:
        out += F.embedding_bag(ids_tk, bias_eh.to(wide), per_sample_weights=scale, mode="sum")
    return out.to(dtype or rows_sh.dtype)


def bias_weight_grad(grad_th: Tensor, bias_eh: Tensor, ids_tk: Tensor) -> Tensor:
    """Return the bias term of the routing weights' gradient, (T, k): a token's gradient times its slot's bias."""
    wide = torch.promote_types(grad_th.dtype, torch.float32)
    return (grad_th @ bias_eh.t()).gather(1, ids_tk.long()).to(wide)
