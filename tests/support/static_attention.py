"""The oracle of attention over static batches: output and gradients of the plain row."""

from __future__ import annotations

from typing import Any

import torch
from attention_material import HEAD_DIM, HEADS, KV_HEADS, SCALE, prepared
from torch import Tensor

from fastpack_trl.attention.interface import AttentionCall

STATIC_KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 4}, "sinks": {"sinks": True}, "both": {"window": 4, "sinks": True},
}  # fmt: skip


def tensors_of(tokens: int, *, sinks: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(HEADS,)] if sinks else []
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_as_plain(static: Any, inputs: Any, kind: str, name: str, *, device: str = "cpu", dtype: Any = None) -> None:
    """Output and gradients of a row in its static form, whose tail has no loss, are those of the plain row."""
    plain, how, tokens = inputs["packed_batch"], STATIC_KINDS[kind], sum(inputs["packed_batch"].seq_lengths)
    row = max(static.bucket.tokens, plain.total_tokens)
    windows = [how["window"]] if "window" in how else []
    layer, alone = (prepared(name, batch, *windows, device=device) for batch in (static.batch, plain))
    tensors = tensors_of(row, sinks="sinks" in how, dtype=dtype or torch.float64)
    tensors = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    upstream = torch.zeros(1, row, HEADS, HEAD_DIM, dtype=tensors[0].dtype, device=device)
    draw = torch.Generator().manual_seed(1)
    upstream[:, :tokens] = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=draw).to(upstream)
    results = []
    for one, row in ((layer, static.bucket.tokens), *[(alone, plain.total_tokens)] * 2):
        cut = [t.detach()[:, :, :row].requires_grad_() if t.dim() == 4 else t for t in tensors]
        sinks = cut[3] if len(cut) > 3 else None
        out = one.attend(AttentionCall(*cut[:3], SCALE, how.get("window"), sinks=sinks))
        grads = torch.autograd.grad(out, cut, upstream[:, :row].contiguous())
        assert all(grad.isfinite().all() for grad in grads)
        assert all(not grad[:, :, tokens:].any() for grad in grads[:3])
        results.append([out[:, :tokens], *(grad[:, :, :tokens] if grad.dim() == 4 else grad for grad in grads)])
    for ours, once, again in zip(*results, strict=True):
        # Where two plain calls differ, by the order of atomic additions, so may this one.
        budget = 2 * (again - once).norm() + 4 * torch.finfo(once.dtype).eps * (1 + once.norm())
        assert (ours - once).norm() <= budget
