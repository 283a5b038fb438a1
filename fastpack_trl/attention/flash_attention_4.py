"""flash-attn-4 over a whole packed row: Hopper and Blackwell, two thirds of the time of torch's kernel.

Its kernels are compiled at the first call, in about six seconds per kind of attention. Its two functions are called
inside our operator, as compiled and recorded layers require; sinks, windows and softcap are in the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.attention.row_backend import RowBackend
from fastpack_trl.attention.row_operator import HEAD_ALIGNMENT, RowInputs, row_operator
from fastpack_trl.errors import describe
from fastpack_trl.model.facts import UNREADABLE, ModelFeatures
from fastpack_trl.packing.buckets import Bucket

NAME = "flash_attention_4"
_INTERFACE = "flash_attn.cute.interface"
_FORWARD, _BACKWARD = (f"_flash_attn_{way}" for way in ("fwd", "bwd"))


@cache
def _function(name: str) -> Any:
    return getattr(import_module(_INTERFACE), name)


def _in_kernel(row: RowInputs) -> dict[str, Any]:
    """Return the arguments that forward and backward share; the kernel does not count the token itself in a window."""
    window = {"window_size_left": row.window - 1, "window_size_right": 0} if row.window else {}
    return {
        "cu_seqlens_q": row.cu_seqlens, "cu_seqlens_k": row.cu_seqlens_k, "max_seqlen_q": row.max_seqlen,
        "max_seqlen_k": row.max_seqlen_k, "softmax_scale": row.scale, "softcap": row.softcap, "causal": True,
        "learnable_sink": row.sinks, **window,
    }  # fmt: skip


def flash4_attention(row: RowInputs) -> tuple[Tensor, Tensor]:
    """Compute causal attention inside each segment on CUDA; see `row_operator`."""
    out, lse, *_ = _function(_FORWARD)(*row[:3], return_lse=True, **_in_kernel(row))
    return out, lse


def flash4_attention_backward(
    row: RowInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return its gradients."""
    dq, dk, dv, *dsinks = _function(_BACKWARD)(
        *row[:3], out, grad_out, lse, deterministic=torch.are_deterministic_algorithms_enabled(), **_in_kernel(row)
    )
    return dq, dk, dv, dsinks[0] if dsinks else row.query.new_empty(0)


class FlashAttention4(RowBackend):
    """The backend ``flash_attention_4``: CUDA from compute capability 9.0 on, bf16 or fp16, with windows and sinks.

    The trial before it is chosen finds what a generation of devices lacks; wrong gradients are named here.
    """

    name, library, has_softcap = NAME, "flash-attn-4", True
    kernel = row_operator(flash4_attention, flash4_attention_backward)
    generations, needs = range(9, 13), "9.0 or higher, below 13"

    def why_not(self, features: ModelFeatures) -> Iterator[object]:
        yield from super().why_not(features)
        size, generation = features.head_dim, (features.capability or (0,))[0]
        width = -(-size // HEAD_ALIGNMENT) * HEAD_ALIGNMENT
        # On Hopper the backward of 4.0.0b36 adds gradients up in heads rounded up to 16, and reads the sums as of heads
        # rounded up to 32: as large as their error at 8, 16, 40, 72, 80, 112, right at 24, 32, 64, 96, 128, 160, 256.
        wrong = generation == 9 and width <= 128 and -(-width // 16) % 2
        yield wrong and f"{NAME} computes wrong gradients for head_dim {size} on compute capability 9.x"
        varies = generation == 12 and torch.are_deterministic_algorithms_enabled()  # the trial cannot tell
        yield varies and f"{NAME} is not deterministic on compute capability 12.x"
        yield _why_absent()

    def considered(self, features: ModelFeatures) -> bool:
        return features.device_type == "cuda" and (features.capability or (0,))[0] in self.generations

    def refuses_static(self, bucket: Bucket, features: ModelFeatures) -> str:
        return ""


def _why_absent() -> str:
    """Return why the functions cannot be called, or ``""``. Takes seconds the first time."""
    try:
        import_module(_INTERFACE)
    except (ImportError, OSError, *UNREADABLE) as error:  # its libraries raise OSError, RuntimeError too
        if isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", "flash_attn.cute"):
            return f"{NAME} is not installed: pip install --pre 'fastpack-trl[fa4]'"
        return f"{_INTERFACE} cannot be imported: {describe(error)}"
    return ""
