"""An installed flash-attn (2, 3 or 4) behind transformers' own function, with our metadata: no device is asked."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch

NAMES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class FlashAttentionLayer(NamedTuple):
    """What crosses a layer boundary: one tensor and one int."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device."""
    max_seqlen: int
    implementation: str

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
        """Shapes and results as `PerDocumentLayer.attend`."""
        from transformers.modeling_flash_attention_utils import _flash_attention_forward

        extra = {} if sinks is None else {"s_aux": sinks}
        tokens = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        out: Tensor = _flash_attention_forward(
            *tokens, None, query_length=query.shape[2], is_causal=True, dropout=dropout, softmax_scale=scale,
            sliding_window=window, softcap=softcap, cu_seq_lens_q=self.cu_seqlens, cu_seq_lens_k=self.cu_seqlens,
            max_length_q=self.max_seqlen, max_length_k=self.max_seqlen, attn_implementation=self.implementation,
            **extra,
        )  # fmt: skip
        return out.contiguous()


def missing(name: str) -> str:
    """Why an implementation cannot be used here; empty where it can."""
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not hasattr(utils, "_flash_attention_forward"):
        return f"this transformers has no function for {name}"
    checks = importlib.import_module("transformers.utils")
    available = getattr(checks, f"is_flash_attn_{name[-1]}_available", None)
    if available is None or not available():
        return f"{name} is not installed (or has no device): pip install flash-attn"
    return ""


def prepare(batch: PackedBatch, device: torch.device, implementation: str) -> FlashAttentionLayer:
    """The batch's own metadata, on the device."""
    return batch.derive(
        (implementation, device),
        lambda: FlashAttentionLayer(batch.cu_seqlens.to(device), batch.bucketed_max_seqlen, implementation),
    )
