"""Attention backends one by one: what each is called with, and whether what it returns is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch

CUDNN = "cudnn_varlen"
NAMES = (*BACKENDS, CUDNN)

TIMES_BUDGET = 2.0
"""A backend may be this many times as far from float64 as dense attention in the same dtype is."""

GATE_LENGTHS, GATE_WINDOW, GATE_SEEDS = (1, 77, 160, 62), 40, 4

Attend = Callable[[list[Tensor]], Tensor]
"""From query, key, value and, where there are any, sinks to (1, total_tokens, heads, head_dim)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer, e.g. ``Heads(32, 8, 128)``."""

    heads: int
    kv_heads: int
    head_dim: int
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads x {self.head_dim}{', sinks' * self.sinks}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer on one device: everything but the row."""

    heads: Heads
    window: int | None
    dtype: torch.dtype
    device: str

    @property
    def features(self) -> ModelFeatures:
        """Return the facts that a chooser would read from a model with this layer."""
        cuda = self.device == "cuda"
        return ModelFeatures(
            model_type="bench",
            implementation="eager" if self.heads.sinks else "sdpa",  # stock sdpa knows no sinks
            device_type=self.device,
            windows=frozenset(() if self.window is None else (self.window,)),
            sinks=self.heads.sinks,
            softcap=False,
            dropout=0.0,
            num_heads=self.heads.heads,
            head_dim=self.heads.head_dim,
            compute_dtype=self.dtype,
            capability=torch.cuda.get_device_capability() if cuda else None,
            gap="",
        )

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)

    def inputs(self, total_tokens: int, seed: int) -> list[Tensor]:
        """Return random query, key, value and sinks, laid out as by projections: (1, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        make = partial(torch.randn, generator=generator, device=self.device)
        heads = self.heads
        tensors = [
            make(1, total_tokens, count, heads.head_dim).to(self.dtype).transpose(1, 2)
            for count in (heads.heads, heads.kv_heads, heads.kv_heads)
        ]
        tensors += [make(heads.heads).to(self.dtype)] if heads.sinks else []
        return [tensor.requires_grad_() for tensor in tensors]


def refusal(name: str, layer: Layer) -> str:
    """Return why a backend is not tried for a layer; empty if it is."""
    if name != CUDNN:
        return BACKENDS[name].refuses(layer.features)
    reasons = {
        f"needs CUDA, this is {layer.device}": layer.device != "cuda",
        f"needs bf16 or fp16, not {layer.dtype}": layer.dtype not in (torch.bfloat16, torch.float16),
        "has no window: torch's operator takes none": layer.window is not None,
        "has no sinks": layer.heads.sinks,
    }
    return next((f"{CUDNN} {reason}" for reason, holds in reasons.items() if holds), "")


def prepare(name: str, layer: Layer, batch: PackedBatch) -> Attend:
    """Return the call that runs per layer and step; masks and metadata are made here, once, as in training.

    Args:
        name: one of `NAMES`.
        layer: its heads, window, dtype and device.
        batch: the documents, on the layer's device.
    """
    if name == CUDNN:
        return partial(_cudnn, batch.cu_seqlens, batch.max_seqlen, layer.scale)
    prepared = BACKENDS[name].prepare(batch, layer.features, torch.device(layer.device))
    module = _stock_module(layer) if name == "sdpa" else None

    def attend(inputs: list[Tensor]) -> Tensor:
        query, key, value, *sinks = inputs
        if module is not None and sinks:
            module.sinks = sinks[0]  # stock's eager function reads them from the module
        return prepared.attend(
            AttentionCall(query, key, value, layer.scale, layer.window, sinks[0] if sinks else None, module=module)
        )

    return attend


def _stock_module(layer: Layer) -> Any:
    """Return an attention module for stock's function to read: gpt-oss's with sinks, Llama's without."""
    from transformers import LlamaConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    heads = layer.heads
    fields = {
        "num_attention_heads": heads.heads, "num_key_value_heads": heads.kv_heads, "head_dim": heads.head_dim,
        "hidden_size": heads.heads, "num_hidden_layers": 1, "attention_dropout": 0.0,  # no projection of it is used
    }  # fmt: skip
    if not heads.sinks:
        return LlamaAttention(LlamaConfig(**fields), 0)

    class Module(GptOssAttention):
        sinks: Any = None

        def __init__(self) -> None:
            nn.Module.__init__(self)  # none of its projections is used
            self.num_key_value_groups = heads.heads // heads.kv_heads

    return Module()


def _cudnn(cu_seqlens: Tensor, max_seqlen: int, scale: float, inputs: list[Tensor]) -> Tensor:
    """Run cuDNN's attention over ragged rows, through the operator that torch's nested tensors use."""
    tokens = [tensor[0].transpose(0, 1).contiguous() for tensor in inputs]
    out: Tensor = torch.ops.aten._cudnn_attention_forward(
        *tokens, None, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, True, 0.0, True, False, scale=scale
    )[0]
    return out[None]


def dense(layer: Layer, batch: PackedBatch, inputs: list[Tensor]) -> Tensor:
    """Run attention under a dense mask in plain torch: exact in float64, stock's arithmetic in lower dtypes."""
    query, key, value, *sinks = inputs
    key, value = (tensor.repeat_interleave(layer.heads.heads // layer.heads.kv_heads, dim=1) for tensor in (key, value))
    allowed = dense_mask(batch, layer.window, query.device)
    scores = (query @ key.transpose(-1, -2) * layer.scale).masked_fill(~allowed, -torch.inf)
    if sinks:
        column = sinks[0].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(-1)[..., : batch.total_tokens]
    return (probabilities @ value).transpose(1, 2)


def check(name: str, layer: Layer) -> dict[str, Any]:
    """Compare output and gradients on a small row with float64, beside those of dense attention in the same dtype.

    Returns:
        ``errors`` and ``budget``: relative errors in the 2-norm, over several draws, of the output and of the gradients
        of query, key, value and sinks; ``wrong``: what is over its budget, empty where nothing is.
    """
    # A window that the small row exceeds, where the layer has one.
    small = replace(layer, window=None if layer.window is None else min(layer.window, GATE_WINDOW))
    batch = PackedBatch.from_lengths(GATE_LENGTHS).to(layer.device)
    attend = prepare(name, small, batch)
    actual, budget = [], []
    for seed in range(GATE_SEEDS):
        inputs = small.inputs(batch.total_tokens, seed)
        upstream = torch.randn(
            1, batch.total_tokens, small.heads.heads, small.heads.head_dim,
            generator=torch.Generator(layer.device).manual_seed(seed + GATE_SEEDS), device=layer.device,
        )  # fmt: skip
        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        exact = _run(partial(dense, small, batch), doubles, upstream)
        actual.append(_errors(_run(attend, inputs, upstream), exact))
        budget.append(_errors(_run(partial(dense, small, batch), inputs, upstream), exact))
    parts = ("out", "dquery", "dkey", "dvalue", "dsinks")
    mean_error, mean_budget = (torch.stack(rows).square().mean(0).sqrt().tolist() for rows in (actual, budget))
    # One rounding of the result itself on top: the gradient of a few sinks is too short for its error to average out.
    bounds = [TIMES_BUDGET * value + torch.finfo(layer.dtype).eps / 2 for value in mean_budget]
    wrong = [
        f"{part} is off by {error:.2e}, over {bound:.2e}"
        for part, error, bound in zip(parts, mean_error, bounds, strict=False)
        if not error <= bound  # a NaN is over every bound
    ]
    return {
        "errors": dict(zip(parts, mean_error, strict=False)),
        "budget": dict(zip(parts, mean_budget, strict=False)),
        "wrong": "; ".join(wrong),
    }


def _run(attend: Attend, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = attend(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]


def _errors(actual: list[Tensor], exact: list[Tensor]) -> Tensor:
    return torch.stack([(a.double() - e).norm() / e.norm() for a, e in zip(actual, exact, strict=True)]).cpu()
