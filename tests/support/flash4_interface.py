"""Stands for `flash_attn.cute.interface` of flash-attn-4 4.0.0b36 without a device: its two functions, by a loop.

Their parameters are those of that version, as far as a packed row could use them; windows leave the token itself out.
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

from fastpack_trl.attention import flash_attention_4, varlen_common

INTERFACE = "flash_attn.cute.interface"


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: None = None, seqused_k: None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, min_seqlen_k: None = None, page_table: None = None,
    softmax_scale: float | None = None, causal: bool = False, softcap: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, learnable_sink: Tensor | None = None,
    *, return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    assert causal, "a row is causal"
    assert window_size_right in (None, 0)
    assert q.shape[-1] % 8 == 0, "the kernel copies eight values at a time"
    outs, lses = [], []
    bounds = [list(pairwise(ends.tolist())) for ends in (cu_seqlens_q, cu_seqlens_k) if ends is not None]
    for (start, end), (first, last) in zip(*bounds, strict=True):
        assert end - start <= (max_seqlen_q or 0), "max_seqlen_q is the size of the kernel's grid"
        assert last - first <= (max_seqlen_k or 0)
        key, value = (one[first:last].repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], key) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        back = torch.arange(end - start)[:, None] + (last - first) - (end - start) - torch.arange(last - first)
        unseen = (back < 0) | (back > (last if window_size_left is None else window_size_left))
        scores = scores.masked_fill(unseen, -torch.inf)
        lse = scores.logsumexp(-1)
        lse = lse if learnable_sink is None else torch.logaddexp(lse, learnable_sink[:, None])
        outs.append(torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1) if return_lse else None, None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, deterministic: bool = False,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    leaves = [one.detach().requires_grad_() for one in (q, k, v, learnable_sink) if one is not None]
    with torch.enable_grad():
        again, lse_again, *_ = _flash_attn_fwd(
            *leaves[:3], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
            window_size_left=window_size_left, window_size_right=window_size_right,
            learnable_sink=leaves[3] if leaves[3:] else None, return_lse=True,
        )  # fmt: skip
    torch.testing.assert_close((again, lse_again), (out, lse))
    return torch.autograd.grad(again, leaves, dout, allow_unused=True, materialize_grads=True)


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
        patch.setattr(varlen_common, "_twin", flash_attention_4.flash4_attention)
        patch.setattr(varlen_common, "_twin_backward", flash_attention_4.flash4_attention_backward)
        yield
    flash_attention_4._function.cache_clear()
