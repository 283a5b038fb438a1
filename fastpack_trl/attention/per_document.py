"""One attention call per document, with lengths from the host: any device, any dtype, no total_tokens^2 anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack_trl.attention.interface import AttentionCall, Backend, described, gather_keys
from fastpack_trl.attention.reference import band_mask, document_attention
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch


class PerDocumentLayer(NamedTuple):
    """Lengths on the host and masks on the device; no part of a graph, which would be made again for each row."""

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    """Keys of each segment: its own tokens, after those of a shared prefix."""
    masks: dict[int | None, Tensor]
    """Per window that a segment exceeds: (keys, keys) bool of the longest one; None: the causal mask of shared rows."""
    repeats: bool = False
    """Heads of keys are repeated for the kernel of the device, which a forecast on a CPU may be for."""
    key_index: Tensor | None = None
    """(total_keys,) int64 on the device: the tokens of the row that are keys (`SharedKeys`); None: each token once."""
    blocks: dict[int | None, tuple[Tensor, ...]] | None = None
    """Per window (None: full), the mask of each segment, (tokens, tokens) bool, if images are seen whole."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend segment by segment.

        Raises:
            ValueError: dropout is not 0.
        """
        if call.dropout:
            raise ValueError(
                f"per_document does not support attention dropout ({call.dropout}): set packed_attention='sdpa'"
            )
        key, value = call.key, call.value
        if self.key_index is not None:
            key, value = (gather_keys(tensor, self.key_index, dim=2) for tensor in (key, value))
        masks = (None,) * len(self.lengths) if self.blocks is None else self.blocks[call.window]
        if len(self.lengths) == 1:
            return self._segment(call, call.query, key, value, masks[0]).transpose(1, 2).contiguous()
        # `split` has one `cat` as its backward pass; slices would each add to a tensor as long as the row.
        keyed = (key.split(self.key_lengths, 2), value.split(self.key_lengths, 2))
        parts = zip(call.query.split(self.lengths, 2), *keyed, masks, strict=True)
        return torch.cat([self._segment(call, *part).transpose(1, 2) for part in parts], dim=1)

    def _segment(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        keys, prefix = key.shape[2], key.shape[2] - query.shape[2]
        eager = call.sinks is not None or call.softcap is not None
        windowed = call.window is not None and call.window < keys
        # The causality of torch's kernels is aligned top-left: queries behind a prefix need a mask.
        if mask is None and (windowed or eager or prefix):
            mask = self.masks.get(call.window if windowed else None)
            mask = band_mask(keys, (call.window or keys) if windowed else keys, query.device) if mask is None else mask
            mask = mask[prefix:keys, :keys]
        if eager:
            inputs = (query, key, value, mask, call.scale, call.sinks, call.softcap)
            # Autograd would keep the scores, in fp32 and for every layer; backward recomputes them.
            out: Tensor = checkpoint(_eager, *inputs, use_reentrant=False, preserve_rng_state=False)
            return out
        groups = query.shape[1] // key.shape[1]
        # Of torch's fused kernels on CUDA, only flash takes groups of heads; what it can run has `varlen`.
        if groups > 1 and self.repeats:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip


def _eager(query: Tensor, *rest: Any) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):  # the function chooses its own dtype: fp32
        return document_attention(query, *rest)[0]


class PerDocument(Backend):
    """The backend ``per_document``: every device, dtype, window, sink and softcap; no dropout."""

    name = "per_document"
    flattens = shares = sees_blocks = True

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        yield features.dropout and f"attention dropout is {features.dropout}: per-document kernels do not support it"

    def reason(self, features: ModelFeatures) -> str:
        device = features.device_type.upper()
        return f"one attention call per document ({device}), {described(features)}".removesuffix(", plain causal")

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> PerDocumentLayer:
        lengths, shared = batch.segment_lengths, batch.shared
        keys = lengths
        if shared is not None:
            keys = tuple(length + prefix for length, prefix in zip(lengths, shared.prefix_lengths, strict=True))
        longest = max(keys)
        windows: list[int | None] = [window for window in features.windows if window < longest]
        windows += [None] if shared is not None else []
        masks = {window: band_mask(longest, window or longest, device) for window in windows}
        index = None if shared is None else shared.key_index.to(device)
        blocks = None
        if batch.blocks is not None:
            blocks = {window: block_masks(batch, window, device) for window in (None, *features.windows)}
        return PerDocumentLayer(lengths, keys, masks, features.device_type == "cuda", index, blocks)


def block_masks(batch: PackedBatch, window: int | None, device: torch.device) -> tuple[Tensor, ...]:
    """Return the keys that each token of a segment sees: (tokens, tokens) bool, by `Blocks.key_ends`."""
    assert batch.blocks is not None
    place, key_ends, masks = torch.arange(batch.total_tokens, device=device), batch.blocks.key_ends.to(device), []
    for own, ends in zip(*(each.split(batch.segment_lengths) for each in (place, key_ends)), strict=True):
        seen = own < ends[:, None]
        masks.append(seen if window is None else seen & (own > own[:, None] - window))
    return tuple(masks)
