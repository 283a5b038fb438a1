"""xFormers' memory-efficient attention with its block-diagonal mask made once per batch; never chosen by ``auto``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch


class XformersLayer(NamedTuple):
    """What crosses a layer boundary: one `BlockDiagonalCausalMask` per window (None: full)."""

    biases: dict[int | None, Any]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        module: Any = None,
    ) -> Tensor:
        """Shapes and results as `PerDocumentLayer.attend`.

        Raises:
            ValueError: sinks or softcap, which it does not have.
        """
        from xformers.ops import memory_efficient_attention

        if sinks is not None or softcap is not None:
            raise ValueError("xformers has neither sinks nor softcap: set packed_attention='auto'")
        groups = query.shape[1] // key.shape[1]
        tokens = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        if groups > 1:  # (1, tokens, kv heads, queries per kv head, head_dim), keys and values without a copy
            q, *kv = tokens
            q = q.unflatten(2, (key.shape[1], groups))
            tokens = [q, *(tensor[:, :, :, None].expand(*tensor.shape[:3], groups, tensor.shape[-1]) for tensor in kv)]
        out = memory_efficient_attention(*tokens, attn_bias=self.biases[window], p=dropout, scale=scale)
        result: Tensor = (out.flatten(2, 3) if groups > 1 else out).contiguous()
        return result


def prepare(batch: PackedBatch, windows: frozenset[int], device: torch.device) -> XformersLayer:
    """One mask per window and one without."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    def build() -> XformersLayer:
        full = BlockDiagonalCausalMask.from_seqlens(list(batch.segment_lengths), device=device)
        # xFormers' window counts the token itself, as transformers' does.
        return XformersLayer({None: full, **{window: full.make_local_attention(window) for window in windows}})

    return batch.derive(("xformers", device), build)
