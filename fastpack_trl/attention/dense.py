"""Stock attention with the dense mask built once per batch, device, dtype and window, from the document lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.model.stock_attention import stock_attention
from fastpack_trl.packing.masks import dense_mask
from fastpack_trl.packing.packed_batch import PackedBatch


class DenseLayer(NamedTuple):
    """What crosses a layer boundary: the masks, and the name of stock's function."""

    masks: dict[int | None, Tensor]
    """Per window (None: full): (1, 1, total_tokens, total_tokens), bool for sdpa, additive float for eager."""
    implementation: str

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
        softcap: float | None,
        dropout: float,
        module: Any,
    ) -> Tensor:
        """Stock's own function with the prepared mask; shapes as in `PerDocumentLayer.attend`."""
        extra: dict[str, Any] = {} if sinks is None else {"s_aux": sinks}
        if softcap is not None:
            extra["softcap"] = softcap
        mask = self.masks[window]
        if mask.is_floating_point():
            mask = mask.to(query.dtype)  # eager adds it to the scores: their dtype must stay stock's
        out: Tensor = stock_attention(module, self.implementation)(
            module, query, key, value, mask, scaling=scale, dropout=dropout, **extra
        )[0]
        return out


def prepare(batch: PackedBatch, windows: frozenset[int], device: torch.device, implementation: str) -> DenseLayer:
    """Build one mask per window and one without."""
    dtype = torch.bool if implementation != "eager" else torch.float32

    def build() -> DenseLayer:
        masks: dict[int | None, Tensor] = {
            window: dense_mask(batch, window, device, dtype) for window in (None, *sorted(windows))
        }
        return DenseLayer(masks, implementation)

    return batch.derive(("sdpa", device), build)
