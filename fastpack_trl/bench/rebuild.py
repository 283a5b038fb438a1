"""Packed attention whose metadata is rebuilt from positions in every layer, not made once per batch.

It reconstructs, in plain torch, the baseline of published figures. Attention is TRL's own function under a dense mask,
so that only bookkeeping and kernel differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpack_trl.attention.dense import DenseLayer
from fastpack_trl.attention.install import switched
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.reference import band_mask
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import attention_modules, backbones, read_features, window_of


def metadata_of(position_ids: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return ``cu_seqlens``, tokens per document and the longest one, read back from a packed row; two device syncs.

    Args:
        position_ids: (1, total_tokens), starting at 0 in each document.
    """
    starts = (position_ids[0] == 0).nonzero().squeeze(1)  # asks the device how many there are
    end = starts.new_full((1,), position_ids.shape[1])
    cu_seqlens = torch.cat([starts, end]).to(torch.int32)
    lengths = cu_seqlens.diff()
    return cu_seqlens, lengths, int(lengths.max())  # and how long the longest is


def dense_mask_of(lengths: Tensor, window: int | None) -> Tensor:
    """Return (1, 1, total_tokens, total_tokens) bool, one causal block per document; reads lengths from the device."""
    blocks = [band_mask(length, window or length, lengths.device) for length in lengths.tolist()]
    return torch.block_diag(*blocks).bool()[None, None]


class RebuildLayer(NamedTuple):
    """The argument that crosses a layer boundary: positions only; each layer makes everything else again."""

    position_ids: Tensor
    implementation: str

    def attend(self, call: AttentionCall) -> Tensor:
        """Rebuild the lengths and the mask, then call stock's own function."""
        _cu_seqlens, lengths, _longest = metadata_of(self.position_ids)
        mask = dense_mask_of(lengths, call.window)
        if self.implementation == "eager":
            mask = torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return DenseLayer({call.window: mask}, self.implementation).attend(call)


@contextlib.contextmanager
def rebuild_per_layer(model: nn.Module) -> Iterator[None]:
    """Make metadata and mask of packed rows (``position_ids`` that start again) anew in each attention layer, inside.

    It reads no more than ``position_ids``, needs no collator of ours, and goes through the same seam as
    `packed_attention`; the model is restored on exit.

    Raises:
        ValueError: the model's attention cannot be reached through transformers' interface.
    """
    features = read_features(model)
    if gap := features.gap or ", ".join(sorted(features.mixers)):
        raise ValueError(f"the mask cannot be rebuilt in each layer: {gap}")

    def prepare(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = kwargs.get("position_ids")
        if positions is not None and "packed_layer" not in kwargs:
            kwargs["packed_layer"] = RebuildLayer(positions, features.implementation)
            # A 4-D mask is returned by transformers as it is: stock's own mask would be a second one.
            kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=positions.device)
        return args, kwargs

    with switched(model, features), contextlib.ExitStack() as stack:
        for module in backbones(model):
            stack.callback(module.register_forward_pre_hook(prepare, with_kwargs=True).remove)
        for module in attention_modules(model):
            stack.enter_context(patch_attribute(module, "_fastpack_window", window_of(module)))
        yield
