"""The only guard around Triton kernels."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

on_device_of = torch.cuda.device_of
"""A context manager: Triton launches on the current device, which may not be the tensors' device."""

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
    given = [tensor for tensor in tensors if tensor is not None]
    covered = all(tensor.is_cuda and tensor.dtype in DTYPES and is_supported(tensor.device) for tensor in given)
    return covered and has_triton()
