"""Attention of a tower over all images or windows of a batch: transformers calls it as it calls flash-attn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.model.facts import stock_attention
from fastpack_trl.vision.lengths import lengths_of

NAME, STOCK = "fastpack_flash_segments", "sdpa"
"""In transformers' registry. Attention modules of towers pass ends of images to names with "flash"."""
CALLS = "fastpack_calls"
"""A list on a module in a proof: the segments of each call."""
HALF = (torch.bfloat16, torch.float16)


def segment_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *args: Any,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Any = None, max_length_q: Any = None, max_length_k: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Attend inside of segments: by one kernel, if not causal, on CUDA and in half precision; else one by one.

    Args:
        query, key, value: (1, heads, tokens, head_dim).
        cu_seq_lens_q: (segments + 1,) ends of the segments; None: transformers' own attention.

    Returns:
        (1, tokens, heads, head_dim), and no weights.
    """
    own = stock_attention(module, STOCK)
    if cu_seq_lens_q is None:
        return own(module, query, key, value, attention_mask, *args, **kwargs)
    lengths, device = lengths_of(cu_seq_lens_q), query.device.type
    vars(module).get(CALLS, []).append(len(lengths))
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    if attention_mask is None and not is_causal and not kwargs.get("dropout") and _has_kernel(query, value, lengths):
        rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        segments = (*[cu_seq_lens_q.to(torch.int32)] * 2, *[max(lengths)] * 2)
        window = {"window_size_left": -1, "window_size_right": -1}
        out = torch.ops.aten._flash_attention_forward(
            *rows, *segments, 0.0, False, False, scale=kwargs.get("scaling"), **window
        )
        return out[0][None], None
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    return torch.cat([own(module, *part, attention_mask, *args, **kwargs)[0] for part in parts], dim=1), None


def _has_kernel(query: Tensor, value: Tensor, lengths: tuple[int, ...]) -> bool:
    """Return whether torch's flash kernel takes a row; its backward indexes a padded buffer with an int32."""
    _, heads, tokens, width = query.shape
    fits = (tokens + 128 * len(lengths)) * heads * (-(-width // 32) * 32) < 2**31
    fits = fits and width == value.shape[-1] and width % 8 == 0 and width <= 256
    fits = fits and hasattr(torch.ops.aten, "_flash_attention_forward")
    return fits and query.is_cuda and query.dtype == value.dtype and query.dtype in HALF and is_supported(query.device)
