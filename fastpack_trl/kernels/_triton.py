"""The only guard around Triton kernels."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

on_device_of = torch.cuda.device_of
"""A context manager: Triton launches on the current device, which is not that of a layer on another one."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether Triton is installed; it is imported only when a kernel runs."""
    return find_spec("triton") is not None


def runs_triton(*tensors: Tensor | None) -> bool:
    """Return whether a kernel may take these tensors: on CUDA, contiguous or not, in fp32, bf16 or fp16."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(tensor.is_cuda and tensor.dtype in DTYPES for tensor in given) and has_triton()
