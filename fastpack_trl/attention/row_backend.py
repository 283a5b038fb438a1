"""Backends whose flash kernel runs over a whole packed row: the segments that it reads, and what it cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall, Backend, described, gather_keys
from fastpack_trl.attention.reference import NO_SOFTCAP, NO_WINDOW
from fastpack_trl.attention.row_operator import HEAD_ALIGNMENT, MAX_HEAD_DIM
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.packed_batch import PackedBatch, rounded_length


class RowLayer(NamedTuple):
    """Segments of a row for a kernel over the whole row; crosses a layer boundary."""

    backend: RowBackend
    cu_seqlens: Tensor
    """(num_segments + 1,) int32 on the device, starting at 0."""
    max_seqlen: int
    cu_seqlens_k: Tensor
    """Of the keys; the same tensor if no segment has a prefix."""
    max_seqlen_k: int
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device, tokens of the row that are its keys (`SharedKeys`); None: its own tokens."""
    blocks: Blocks | None = None
    """Images whose tokens attend to each other, on the device: a second call, which is not causal."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend over the whole row.

        Raises:
            ValueError: dropout or a softcap, which the kernel does not support; names the fix.
        """
        if call.dropout or (call.softcap is not None and not self.backend.has_softcap):
            what = "dropout" if call.dropout else "softcap"
            raise ValueError(f"{self.backend.name} has no {what}: set packed_attention='per_document' or 'sdpa'")
        width = -(-max(call.query.shape[-1], call.value.shape[-1]) // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
        # Not `[0]`, whose backward fills and copies.
        tensors = [tensor.squeeze(0).transpose(0, 1) for tensor in (call.query, call.key, call.value)]
        # Zeros change no score, and no value before them.
        padded = [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors]
        if torch.compiler.is_compiling():
            # The kernel's results have the strides of its inputs, a graph expects rows one after the other. There the
            # kernel that writes them (rotary embedding) writes them so; eager it would be a copy, and is not needed.
            padded = [tensor.contiguous() for tensor in padded]
        query, *keyed = padded
        if self.key_index is not None:
            keyed = [gather_keys(tensor, self.key_index) for tensor in keyed]
        out, _ = self.backend.kernel(
            query, *keyed, call.sinks, self.cu_seqlens, self.cu_seqlens_k, self.max_seqlen, self.max_seqlen_k,
            call.scale, call.window or NO_WINDOW, call.softcap or NO_SOFTCAP,
        )  # fmt: skip
        if self.blocks is not None:
            seen = attend_blocks(self.blocks, query, keyed[0], keyed[1], call.scale, call.window)
            out = out.index_copy(0, self.blocks.tokens, seen)
        return out[None, ..., : call.value.shape[-1]].contiguous()


class RowBackend(Backend):
    """A backend whose flash kernel runs over a whole row, with windows and sinks.

    Attributes:
        kernel: the operator, of `row_operator`.
        library: its name in reports.
        generations: major compute capabilities that it supports; `needs` says so in messages.
    """

    flattens = shares = True
    has_softcap = False
    kernel: Any
    library: str
    generations: range
    needs: str

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        name, dtype, capability = self.name, str(features.compute_dtype), features.capability
        device = ".".join(map(str, capability or ()))
        yield features.device_type != "cuda" and f"{name} needs CUDA, the model is on {features.device_type}"
        unsupported = capability is not None and capability[0] not in self.generations
        yield unsupported and f"{name} needs compute capability {self.needs}, this device has {device}"
        wide = features.compute_dtype not in (torch.bfloat16, torch.float16)
        yield wide and f"{name} needs bf16 or fp16, this run computes in {dtype.removeprefix('torch.')} (bf16=False?)"
        too_wide = features.head_dim > MAX_HEAD_DIM
        yield too_wide and f"head_dim {features.head_dim} is over {name}'s limit of {MAX_HEAD_DIM}"
        yield features.dropout and f"{name} does not support dropout (the model's is {features.dropout})"
        yield features.softcap and not self.has_softcap and f"{name} has no softcap"

    def reason(self, features: ModelFeatures) -> str:
        capability, dtype = "".join(map(str, features.capability or ())), str(features.compute_dtype)
        return f"{self.library}, {dtype.removeprefix('torch.')}, sm{capability}; {described(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> RowLayer:
        ends, longest = batch.cu_seqlens.to(device), batch.bucketed_max_seqlen
        if batch.shared is None:
            blocks = batch.blocks and batch.blocks.to(device)
            return RowLayer(self, ends, longest, ends, longest, blocks=blocks)
        keys = batch.shared.to(device)
        return RowLayer(self, ends, longest, keys.cu_seqlens_k, rounded_length(keys.max_seqlen_k), keys.key_index)


def attend_blocks(
    blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Return the attention of the tokens of images over their keys, (image_tokens, heads, head_dim), not causal.

    Args:
        query, key, value: (total_tokens, heads, head_dim), of the row.
        window: tokens before it that a query sees, itself included, and all after it to the end of its image.
    """
    query = query.index_select(0, blocks.tokens)
    key, value = (gather_keys(each, blocks.key_index) for each in (key, value))
    if query.is_cuda:
        segments = (blocks.cu_seqlens, blocks.cu_seqlens_k, *map(rounded_length, blocks.longest), 0.0, False, False)
        sizes = {"window_size_left": window - 1 if window else -1, "window_size_right": -1}
        out: Tensor = torch.ops.aten._flash_attention_forward(query, key, value, *segments, scale=scale, **sizes)[0]
        return out
    # By tensors alone, as the kernel does: of static blocks the host knows no length.
    (image, place), (of, key_place) = _places(blocks.cu_seqlens, query), _places(blocks.cu_seqlens_k, key)
    last = (place + (blocks.cu_seqlens_k.diff() - blocks.cu_seqlens.diff())[image])[:, None]
    mask = (image[:, None] == of) & (key_place > last - (window or len(key_place)))
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _places(ends: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the segment of each entry of a tensor, and its place in it, by the (segments + 1,) `ends`."""
    entries = torch.arange(len(of), dtype=ends.dtype, device=ends.device)
    segment = torch.bucketize(entries, ends[1:], right=True)
    return segment, entries - ends[segment]
