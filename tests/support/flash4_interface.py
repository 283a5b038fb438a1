"""Stands for `flash_attn.cute.interface` of flash-attn-4 4.0.0b36 without a device: its two functions, by a loop.

They take what that version takes, as far as a packed row uses it; windows leave the token itself out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack_trl.attention import flash_attention_4, row_operator
from fastpack_trl.attention.reference import band_mask, document_attention

INTERFACE = "flash_attn.cute.interface"


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, softmax_scale: float, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    assert causal, "a row is causal"
    assert window_size_right in (None, 0)
    assert q.shape[-1] % 8 == 0, "the kernel copies eight values at a time"
    parts = []
    bounds = (pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_k))
    for (start, end), (first, last) in zip(*bounds, strict=True):
        queries, keys = end - start, last - first
        assert queries <= max_seqlen_q, "max_seqlen_q is the size of the kernel's grid"
        assert keys <= max_seqlen_k
        mask = band_mask(keys, keys if window_size_left is None else window_size_left + 1)[keys - queries :]
        one = (part.transpose(0, 1)[None] for part in (q[start:end], k[first:last], v[first:last]))
        parts.append(document_attention(*one, mask, softmax_scale, learnable_sink, softcap))
    out, lse = (torch.cat(each, 2)[0] for each in zip(*parts, strict=True))
    return out.transpose(0, 1), lse if return_lse else None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, deterministic: bool = False,
    learnable_sink: Tensor | None = None, **more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    leaves = [one.detach().requires_grad_() for one in (q, k, v, learnable_sink) if one is not None]
    sink = leaves[3] if leaves[3:] else None
    with torch.enable_grad():
        again = _flash_attn_fwd(*leaves[:3], learnable_sink=sink, return_lse=True, **more)
    torch.testing.assert_close(again, (out, lse))
    return torch.autograd.grad(again[0], leaves, dout, allow_unused=True, materialize_grads=True)


def put_in(patch: pytest.MonkeyPatch, interface: Any) -> None:
    """Let an import find `interface` as flash-attn-4's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, INTERFACE, interface)
    flash_attention_4._function.cache_clear()


@contextmanager
def in_place_of_the_twin() -> Iterator[None]:
    """The operator runs what it runs on CUDA, over a loop in plain torch that takes the kernel's arguments."""
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch, sys.modules[__name__])
        patch.setattr(row_operator, "_twin", flash_attention_4.flash4_attention)
        patch.setattr(row_operator, "_twin_backward", flash_attention_4.flash4_attention_backward)
        yield
    flash_attention_4._function.cache_clear()
