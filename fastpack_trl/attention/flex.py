"""torch's flex attention with its `BlockMask` made on the host, once per batch and window."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fastpack_trl.attention.interface import AttentionCall, Backend, described
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch

BLOCK_SIZE = 128
"""Tokens per block of the kernel's grid; torch's default."""
_compiled: dict[str, Any] = {}


class FlexLayer(NamedTuple):
    """One `BlockMask` per window (None: full): what crosses a layer boundary."""

    block_masks: dict[int | None, BlockMask]

    def attend(self, call: AttentionCall) -> Tensor:
        """Call flex with the prepared mask.

        Raises:
            ValueError: dropout is asked for.
        """
        query, key, value, scale, window, sinks, softcap, dropout, _ = call
        if dropout:
            raise ValueError(f"flex has no dropout {dropout}: set packed_attention='sdpa'")

        def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
            return score if softcap is None else softcap * torch.tanh(score / softcap)

        out = _flex()(
            query, key, value, score_mod=capped if softcap is not None else None,
            block_mask=self.block_masks[window], scale=scale, enable_gqa=query.shape[1] != key.shape[1],
            return_lse=sinks is not None,
        )  # fmt: skip
        if sinks is not None:
            # flex differentiates its log-sum-exp: the identity of `operators.py` in autograd's hands.
            out, lse = out
            with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * torch.exp(lse - with_sink)[..., None].to(out.dtype)
        result: Tensor = out.transpose(1, 2).contiguous()
        return result


class Flex(Backend):
    """The backend ``flex``: CUDA, no dropout. Never chosen by ``auto``."""

    name = "flex"
    tried = False  # compiled by torch on its first call: a trial would compile a graph that the run cannot use

    def refuses(self, features: ModelFeatures) -> str:
        if features.device_type != "cuda":
            return f"flex needs CUDA (it has no backward on {features.device_type})"
        return f"flex has no dropout, the model's is {features.dropout}" if features.dropout else ""

    def reason(self, features: ModelFeatures) -> str:
        return f"torch's flex attention; {described(features)}"

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> FlexLayer:
        return FlexLayer({window: block_mask(batch, window, device) for window in (None, *features.windows)})


def block_mask(batch: PackedBatch, window: int | None, device: torch.device) -> BlockMask:
    """Return the causal mask of `batch` as flex's kernels read it.

    `create_block_mask` evaluates all total_tokens^2 pairs; documents are runs of tokens, so two comparisons per pair of
    *blocks* say which blocks are empty, partial or full.
    """
    partial, full = block_occupancy(batch, window)
    segment = batch.seq_idx[0].to(device)
    reach = window or batch.total_tokens

    def same_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (segment[query] == segment[key]) & (query >= key) & (query - key < reach)

    ordered = [torch.from_numpy(array)[None, None] for matrix in (partial, full) for array in _ordered(matrix)]
    mask: BlockMask = BlockMask.from_kv_blocks(
        *ordered, BLOCK_SIZE=BLOCK_SIZE, mask_mod=same_document, seq_lengths=(batch.total_tokens, batch.total_tokens)
    )
    return mask if device.type == "cpu" else mask.to(device)


def block_occupancy(batch: PackedBatch, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where some but not all pairs of tokens attend, and where all do: (blocks, blocks) each."""
    total = batch.total_tokens
    segment: NDArray[np.int64] = np.repeat(np.arange(len(batch.segment_lengths)), batch.segment_lengths)
    first = np.arange(0, total, BLOCK_SIZE)
    last = np.minimum(first + BLOCK_SIZE, total) - 1
    query_first, query_last = first[:, None], last[:, None]
    before = query_first > last
    diagonal: NDArray[np.bool_] = np.eye(len(first), dtype=bool)
    reach = window or total
    # The nearest pair of two different blocks is (first query, last key): documents are contiguous, so if that pair is
    # not of one document, none is. The farthest is (last query, first key).
    nearest = (segment[first][:, None] == segment[last]) & (query_first - last < reach)
    farthest = (segment[last][:, None] == segment[first]) & (query_last - first < reach)
    # The kernels treat a full block without looking at its tokens: one that sticks out of the row is not full.
    whole = (last - first + 1 == BLOCK_SIZE)[:, None] & (last - first + 1 == BLOCK_SIZE)
    full = before & farthest & whole
    some = (before & nearest) | diagonal
    return some & ~full, full


def _ordered(matrix: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return counts per row, and the columns that are set before those that are not: the form of `BlockMask`."""
    counts = matrix.sum(-1).astype(np.int32)
    return counts, np.argsort(~matrix, axis=-1, kind="stable").astype(np.int32)


def _flex() -> Any:
    # Uncompiled, flex computes all total_tokens^2 scores. Dynamo warns of `functools.cache` inside of a compiled layer.
    if "flex" not in _compiled:
        _compiled["flex"] = torch.compile(flex_attention, dynamic=True)
    return _compiled["flex"] if torch.cuda.is_available() else flex_attention
