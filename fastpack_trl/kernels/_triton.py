"""The only guard around Triton kernels."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability that Triton supports; older devices cannot convert bf16 either."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether Triton is installed; it is imported only when a kernel runs."""
    return find_spec("triton") is not None


@lru_cache
def is_supported(device: torch.device) -> bool:
    """Return whether Triton has support for a CUDA device."""
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def runs_triton(*tensors: Tensor | None) -> bool:
    """Return whether a kernel may take these tensors: on CUDA, contiguous or not, in fp32, bf16 or fp16."""
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cuda and tensor.dtype in DTYPES and is_supported(tensor.device)):
            return False
    return has_triton()


_compiled: dict[Any, tuple[Any, list[Any]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel of Triton on the device of its first argument, which is a tensor.

    From the second call of a variant on, the compiled kernel is called itself: Triton's own launch matches the
    signature each time, which takes the host longer than all else in a small layer.

    Args:
        args: those that are not ``tl.constexpr``, in the order of the kernel.
        constants: the others by name, and options such as ``num_warps``.
    """
    device = args[0].device
    key = (id(kernel), device, *constants.values(), *map(_variant, args))
    # Triton launches on the current device.
    with torch.cuda.device_of(args[0]):
        if key in _compiled:
            compiled, rest = _compiled[key]
            compiled[(*grid, 1, 1)[:3]](*args, *rest)
            return
        compiled = kernel[grid](*args, **constants)
    if compiled is not None and torch.version.hip is None:  # the interpreter compiles nothing
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


def _variant(value: Any) -> Any:
    """Return what Triton compiles a variant for, as its ``specialize`` does."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return (value == 1, value % 16 == 0, value < 2**31) if type(value) is int else type(value)
