"""xFormers' memory-efficient attention with its block-diagonal mask made once per batch; never chosen by ``auto``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch


class XformersLayer(NamedTuple):
    """One `BlockDiagonalCausalMask` per window (None: full); crosses a layer boundary."""

    biases: dict[int | None, Any]

    def attend(self, call: AttentionCall) -> Tensor:
        """Call xFormers' kernel with the prepared mask; `Xformers.refuses` models with sinks or a softcap."""
        from xformers.ops import memory_efficient_attention

        query, key, value, scale, window, _sinks, _softcap, dropout, _ = call
        groups = query.shape[1] // key.shape[1]
        tokens = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        if groups > 1:  # (1, tokens, kv heads, queries per kv head, head_dim), keys and values without a copy
            q, *kv = tokens
            q = q.unflatten(2, (key.shape[1], groups))
            tokens = [q, *(tensor[:, :, :, None].expand(*tensor.shape[:3], groups, tensor.shape[-1]) for tensor in kv)]
        out = memory_efficient_attention(*tokens, attn_bias=self.biases[window], p=dropout, scale=scale)
        result: Tensor = (out.flatten(2, 3) if groups > 1 else out).contiguous()
        return result


class Xformers(Backend):
    """The backend ``xformers``: CUDA, no sinks, no softcap."""

    name = "xformers"

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        yield find_spec("xformers") is None and "xformers is not installed: pip install 'fastpack-trl[xformers]'"
        yield features.device_type != "cuda" and f"xformers needs CUDA, the model is on {features.device_type}"
        yield features.sinks and "xformers has no attention sinks"
        yield features.softcap and "xformers has no softcap"

    def reason(self, features: ModelFeatures) -> str:
        return f"xFormers; {described(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> XformersLayer:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

        full = BlockDiagonalCausalMask.from_seqlens(list(batch.segment_lengths), device=device)
        # xFormers' window counts the token itself, as transformers' does.
        biases: dict[int | None, Any] = {window: full.make_local_attention(window) for window in features.windows}
        return XformersLayer(biases | {None: full})
