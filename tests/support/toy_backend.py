"""Packed attention in plain torch, one score per pair of tokens: a backend to read, not to use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch


class ToyLayer(NamedTuple):
    """Values across a layer boundary: tensors and ints, never lengths as a tuple, which would recompile per batch."""

    document: Tensor
    """(total_tokens,) the index of each token's document."""
    token: Tensor
    """(total_tokens,) 0, 1, 2, ..."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend with a mask that each call makes again."""
        back = self.token[:, None] - self.token
        seen = (self.document[:, None] == self.document) & (back >= 0)
        if call.window is not None:
            seen &= back < call.window
        key, value = (tensor.repeat_interleave(call.query.shape[1] // tensor.shape[1], 1) for tensor in call[1:3])
        scores = (call.query @ key.transpose(-1, -2) * call.scale).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous()


class Toy(Backend):
    """The backend ``toy``: every device and dtype, windows; no sinks, no softcap, no dropout."""

    name = "toy"

    def refuses(self, features: ModelFeatures) -> str:
        return first_reason(
            (
                features.sinks and "toy has no attention sinks",
                features.softcap and "toy has no softcap",
                features.dropout and f"toy has no dropout, the model's is {features.dropout}",
            )
        )

    def reason(self, features: ModelFeatures) -> str:
        return f"plain torch; {described(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> ToyLayer:
        return ToyLayer(batch.seq_idx[0].to(device), torch.arange(batch.total_tokens, device=device))

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        return ""  # both tensors of the layer are of the batch, or of its shape
