"""flash-attn-4 over a whole packed row: Hopper and Blackwell, two thirds of the time of torch's kernel.

Its kernels are compiled at the first call. Its two functions are called inside our operator, as compiled and recorded
layers require; sinks, windows and softcap are in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.attention import varlen_common as common
from fastpack_trl.attention.interface import Backend
from fastpack_trl.errors import describe, first_reason
from fastpack_trl.measure.payback import StartUpCost
from fastpack_trl.model.facts import UNREADABLE, ModelFeatures
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch

NAME = "flash_attention_4"
COMPILE_SECONDS = 6.0
"""Of forward and backward of one kind of attention, before the first call: 4.5 to 7.2 s on the host of an H200."""
SAVED_PER_ELEMENT = 12e-12
"""Seconds less than torch's kernel, forward and backward, per element of the query of a row of many documents: 0.20 ms
of 16/8 heads of 128 over 8,192 tokens, and of 32/8 over 4,096 (H200)."""
_CAPABILITIES = (9, 10, 11, 12)
_INTERFACE = "flash_attn.cute.interface"
_FORWARD, _BACKWARD = (f"_flash_attn_{way}" for way in ("fwd", "bwd"))


@cache
def _function(name: str) -> Any:
    return getattr(import_module(_INTERFACE), name)


def _in_kernel(row: common.RowInputs) -> dict[str, Any]:
    """Return the arguments that forward and backward share; the kernel does not count the token itself in a window."""
    window = {"window_size_left": row.window - 1, "window_size_right": 0} if row.window else {}
    return {
        "cu_seqlens_q": row.cu_seqlens, "cu_seqlens_k": row.cu_seqlens_k, "max_seqlen_q": row.max_seqlen,
        "max_seqlen_k": row.max_seqlen_k, "softmax_scale": row.scale, "softcap": row.softcap, "causal": True,
        "learnable_sink": row.sinks, **window,
    }  # fmt: skip


def flash4_attention(row: common.RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    out, lse, *_ = _function(_FORWARD)(*row[:3], return_lse=True, **_in_kernel(row))
    return out, lse


def flash4_attention_backward(
    row: common.RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return its gradients."""
    dq, dk, dv, *dsinks = _function(_BACKWARD)(
        *row[:3], out, grad_out, lse, deterministic=torch.are_deterministic_algorithms_enabled(), **_in_kernel(row)
    )
    return dq, dk, dv, dsinks[0] if dsinks else row.query.new_empty(0)


common.KERNELS[NAME] = (common.row_operator(flash4_attention, flash4_attention_backward), True)


class FlashAttention4(Backend):
    """The backend ``flash_attention_4``: CUDA from compute capability 9.0 on, bf16 or fp16, with windows and sinks."""

    name = NAME
    flattens = shares = True

    def refuses(self, features: ModelFeatures) -> str:
        unsupported = not has_device(features) and "9.0 or higher, below 13"
        lacks = chain(common.lacks(NAME, features, unsupported), _lacks_on_generation(features))
        return first_reason(lacks) or _why_absent()

    def considered(self, features: ModelFeatures) -> bool:
        return has_device(features)

    def too_costly(self, features: ModelFeatures, elements: float) -> str:
        pays = StartUpCost(COMPILE_SECONDS, SAVED_PER_ELEMENT * elements).pays(1)
        return "" if pays else f"{NAME} would be compiled for longer than it saves in this run"

    def reason(self, features: ModelFeatures) -> str:
        return common.reason_for("flash-attn-4", features)

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        return ""

    def prepare(self, batch: PackedBatch, features: ModelFeatures, device: torch.device) -> common.RowLayer:
        return common.RowLayer.of(NAME, batch, device)


def has_device(features: ModelFeatures) -> bool:
    """Return whether the kernel has code for the device of a model."""
    return features.device_type == "cuda" and (features.capability or (0, 0))[0] in _CAPABILITIES


def _lacks_on_generation(features: ModelFeatures) -> Iterator[object]:
    """Yield what 4.0.0b36 lacks, or computes wrongly, on devices of one generation only."""
    generation, size = (features.capability or (0,))[0], features.head_dim
    width, device = -(-size // common.HEAD_ALIGNMENT) * common.HEAD_ALIGNMENT, f"on compute capability {generation}.x"
    if generation == 9:
        # Its backward adds gradients up in heads rounded up to 16, and reads the sums as of heads rounded up to 32:
        # as large as their error at 8, 16, 40, 72, 80, 112 on an H100, right at 24, 32, 64, 96, 128, 160, 192, 256.
        wrong = width <= 128 and -(-width // 16) % 2
        yield wrong and f"{NAME} computes wrong gradients for head_dim {size} {device}"
    elif generation in (10, 11):
        yield 128 < width < 256 and f"{NAME} has no head_dim {size} {device}, only up to 128 and 256"
        more = {"sinks": features.sinks, "softcap": features.softcap, "windows": features.windows}
        named = " and ".join(filter(more.get, more))
        yield width == 256 and named and f"{NAME} has no {named} for head_dim {size} {device}"
    elif generation == 12:  # 99 KiB hold the backward's 4 tiles of 64 heads, and 2 of 64 x 64
        yield width > 160 and f"head_dim {size} is over {NAME}'s limit of 160 {device}"
        yield features.sinks and f"{NAME} has no sinks {device}"
        fixed = torch.are_deterministic_algorithms_enabled()
        yield fixed and f"{NAME} is not deterministic {device}, as torch.use_deterministic_algorithms asks for"


def _why_absent() -> str:
    """Return why the functions cannot be called, or ``""``. Takes seconds the first time."""
    try:
        interface = import_module(_INTERFACE)
    except (ImportError, OSError, *UNREADABLE) as error:  # its libraries raise OSError, RuntimeError too
        if isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", "flash_attn.cute"):
            return f"{NAME} is not installed: pip install --pre 'fastpack-trl[fa4]'"
        return f"{_INTERFACE} cannot be imported: {describe(error)}"
    missing = [f"{_INTERFACE}.{name}" for name in (_FORWARD, _BACKWARD) if not hasattr(interface, name)]
    return f"the installed flash-attn-4 has no {', '.join(missing)}" if missing else ""
