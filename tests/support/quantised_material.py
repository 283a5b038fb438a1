"""Small PEFT models over bitsandbytes' formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_material import adapted

from fastpack_trl.testing import tiny_model


def quantised(
    kind: str = "nf4",
    *,
    nested: bool = False,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    seed: int = 0,
    **more: Any,
) -> Any:
    """A tiny llama with LoRA, all decoder projections in bitsandbytes' format; `compute`: default that of `dtype`."""
    model = tiny_model("llama", seed=seed, hidden_size=64, intermediate_size=128, **more).to(dtype)
    for layer in model.model.layers:
        for block, names in (
            (layer.self_attn, "q_proj k_proj v_proj o_proj"),
            (layer.mlp, "gate_proj up_proj down_proj"),
        ):
            for name in names.split():
                setattr(
                    block, name, quantised_linear(getattr(block, name), kind, nested=nested, dtype=compute or dtype)
                )
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind != "int8", kind == "int8"
    return adapted(model, target_modules="all-linear")


def quantised_linear(linear: Any, kind: str, *, nested: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The layer in the format ``nf4``, ``fp4`` or ``int8``; skips the test without bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    inner, outer = linear.in_features, linear.out_features
    if kind == "int8":
        out = bnb.nn.Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False)
    else:
        out = bnb.nn.Linear4bit(
            inner, outer, bias=False, compute_dtype=dtype, quant_type=kind, compress_statistics=nested
        )
    out.load_state_dict(linear.state_dict())
    return out.to("cpu")


def packed_weight(
    shape: tuple[int, ...],
    kind: str,
    *,
    nested: bool,
    blocksize: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[torch.Tensor, Any]:
    """A random weight packed by bitsandbytes, and its `QuantState`; skips the test without bitsandbytes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    packed, state = functional.quantize_4bit(values, blocksize=blocksize, quant_type=kind, compress_statistics=nested)
    return packed, state


def dequantise_4bit_torch(packed: torch.Tensor, state: Any, code: torch.Tensor) -> torch.Tensor:
    """The kernel of 4-bit weights in plain torch; `code`: (16,) fp32, the value of each half of a byte."""
    scales = state.absmax
    if state.state2 is not None:
        inner = state.state2
        scales = inner.code[scales.int()] * inner.absmax.repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = scales + state.offset
    stored = packed.contiguous().view(-1).view(torch.uint8)
    values = code[torch.stack((stored >> 4, stored & 15), dim=1).view(-1).int()][: state.shape.numel()]
    scales = scales.repeat_interleave(state.blocksize)[: values.numel()]
    return (values * scales).to(state.dtype).view(state.shape)
