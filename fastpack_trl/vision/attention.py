"""Attention of a tower over all images or windows of a batch: transformers calls it as it calls flash-attn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.model.facts import stock_attention
from fastpack_trl.vision.lengths import lengths_of

NAME = "fastpack_flash_segments"
"""In transformers' registry. Attention modules of towers pass ends of images to names with "flash"."""
STOCK = "sdpa"
CALLS = "fastpack_calls"
"""A list on a module in a proof: the segments of each call."""
_HALF = (torch.bfloat16, torch.float16)


def segment_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: Any = None,
    max_length_k: Any = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend inside of each segment, not causal: one kernel for all on CUDA in half precision, else segment by segment.

    Args:
        query, key, value: (1, heads, tokens, head_dim).
        cu_seq_lens_q: (segments + 1,) ends of the segments; None: transformers' own attention.

    Returns:
        (1, tokens, heads, head_dim), and no weights.
    """
    own = stock_attention(module, STOCK)
    if cu_seq_lens_q is None:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    lengths = lengths_of(cu_seq_lens_q)
    vars(module).get(CALLS, []).append(len(lengths))
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    if attention_mask is None and not is_causal and not kwargs.get("dropout") and _has_kernel(query, value, lengths):
        rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        ends, longest = cu_seq_lens_q.to(torch.int32), max(lengths)
        out = torch.ops.aten._flash_attention_forward(
            *rows, ends, ends, longest, longest, 0.0, False, False, scale=kwargs.get("scaling"),
            window_size_left=-1, window_size_right=-1,
        )[0]  # fmt: skip
        return out[None], None
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    outs = [own(module, *part, attention_mask, *args, **kwargs)[0] for part in parts]
    return torch.cat(outs, dim=1), None


def _has_kernel(query: Tensor, value: Tensor, lengths: tuple[int, ...]) -> bool:
    """Return whether torch's flash kernel takes a row; its backward indexes a padded buffer with an int32."""
    _, heads, tokens, width = query.shape
    buffer = (tokens + 128 * len(lengths)) * heads * (-(-width // 32) * 32)
    fits = width % 8 == 0 and width <= 256 and width == value.shape[-1] and buffer < 2**31
    return fits and query.is_cuda and query.dtype == value.dtype and query.dtype in _HALF and is_supported(query.device)


# The name remains registered: a copy of a model that was made meanwhile keeps working.
AttentionInterface.register(NAME, segment_attention)
