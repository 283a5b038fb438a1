"""An installed flash-attn (2 or 3) behind transformers' own function, with our metadata: no device is asked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch

NAMES = ("flash_attention_2", "flash_attention_3")


class FlashAttentionLayer(NamedTuple):
    """One tensor and one int: what crosses a layer boundary."""

    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device."""
    max_seqlen: int
    implementation: str

    def attend(self, call: AttentionCall) -> Tensor:
        """Call transformers' function over flash-attn with the lengths of the batch."""
        from transformers.modeling_flash_attention_utils import _flash_attention_forward

        extra = {} if call.sinks is None else {"s_aux": call.sinks}
        tokens = [tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value)]
        out: Tensor = _flash_attention_forward(
            *tokens, None, query_length=call.query.shape[2], is_causal=True, dropout=call.dropout,
            softmax_scale=call.scale, sliding_window=call.window, softcap=call.softcap,
            cu_seq_lens_q=self.cu_seqlens, cu_seq_lens_k=self.cu_seqlens, max_length_q=self.max_seqlen,
            max_length_k=self.max_seqlen, attn_implementation=self.implementation, **extra,
        )  # fmt: skip
        return out.contiguous()


class FlashAttention(Backend):
    """A backend per version of flash-attn: CUDA; version 2 has no sinks. Never chosen by ``auto``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, features: ModelFeatures) -> str:
        if features.sinks and self.name == "flash_attention_2":
            return "flash_attention_2 has no attention sinks"
        if features.device_type != "cuda":
            return f"{self.name} needs CUDA, the model is on {features.device_type}"
        return missing(self.name)

    def reason(self, features: ModelFeatures) -> str:
        return f"installed flash-attn; {described(features)}"

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        return f"{self.name} was not tried over static batches: packed_attention='varlen' takes them"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> FlashAttentionLayer:
        return FlashAttentionLayer(batch.cu_seqlens.to(device), batch.bucketed_max_seqlen, self.name)


def missing(name: str) -> str:
    """Return why an implementation cannot be used here, or ``""``."""
    if resolve("transformers.modeling_flash_attention_utils._flash_attention_forward") is None:
        return f"this transformers has no function for {name}"
    available = resolve(f"transformers.utils.is_flash_attn_{name[-1]}_available")
    if available is None or not available():
        return f"{name} is not installed (or has no device): pip install flash-attn"
    return ""
