"""cuDNN's attention over one document after the other: where documents are long, faster than flash over the row.

It is what `scaled_dot_product_attention` takes on Hopper, called by its two operators: inside of an operator of ours,
without a gradient of torch's own, as a compiled or recorded layer needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_CUDNN = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)
MAX_HEAD_DIM = 128
"""Beyond, only some versions have a backward pass, for some head_dim."""
LEAST_TOKENS = 2
"""Of a document: it takes no key alone."""


def serves(query: Tensor, key: Tensor, documents: Sequence[slice], scale: float) -> bool:
    """Return whether torch itself would take cuDNN's kernel, as versions, switches and determinism say now.

    Args:
        query: (total_tokens, num_heads, head_dim).
        key: (total_tokens, num_kv_heads, head_dim), as the value.
        documents: tokens of each, `LEAST_TOKENS` or more.
        scale: factor of the scores.
    """
    if not query.is_cuda or query.shape[-1] > MAX_HEAD_DIM:
        return False
    q, k = (_heads_first(tensor, documents[0]) for tensor in (query, key))
    chosen = torch._fused_sdp_choice(q, k, k, None, 0.0, True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return bool(chosen == _CUDNN)


def forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Sequence[slice], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp, of the shapes of `varlen_attention`."""
    outs, stats = [], []
    for document in documents:
        q, k, v = (_heads_first(tensor, document) for tensor in (query, key, value))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scale
        )
        outs.append(out[0].transpose(0, 1))
        stats.append(lse.view(lse.shape[1:3]))
    return (outs[0], stats[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(stats, dim=1))


def backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, documents: Sequence[slice],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value from the results of `forward`, or of another kernel."""
    no_dropout = torch.empty(1, dtype=torch.int64, device=query.device)
    grads = []
    for document in documents:
        length = document.stop - document.start
        whole = (grad_out, query, key, value, out)
        stats = lse[None, :, document].contiguous().view(1, -1, *(length, 1)[: _stats_dims() - 2])
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_first(tensor, document) for tensor in whole), stats, no_dropout, no_dropout, None, None, None,
            length, length, 0.0, True, scale=scale,
        )  # fmt: skip
        grads.append([grad[0].transpose(0, 1) for grad in found])
    dq, dk, dv = grads[0] if len(grads) == 1 else map(torch.cat, zip(*grads, strict=True))
    return dq, dk, dv


def _heads_first(tensor: Tensor, document: slice) -> Tensor:
    """Return (1, heads, tokens, head_dim) of one document, its first stride that of a batch of one, as in models."""
    rows = tensor[document].transpose(0, 1)
    return rows.as_strided((1, *rows.shape), (rows.numel(), *rows.stride()))


@cache
def _stats_dims() -> int:
    """Return how many dimensions the log-sum-exp has in this torch: the last, of size 1, is left out in some."""
    row = torch.empty(1, 1, 16, 16, device="meta", dtype=torch.bfloat16)
    stats: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(row, row, row, None, True, 0.0, True)[1]
    return stats.dim()
