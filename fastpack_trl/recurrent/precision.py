"""TF32 inside of the scans of 16-bit layers, and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def tensor_cores(tf32: bool) -> Iterator[None]:
    """Let products of fp32 matrices on CUDA round what they multiply to TF32; restored on exit.

    A 16-bit layer rounds what it gives to a scan and what it takes from it to far fewer bits.
    """
    matmul, whole = torch.backends.cuda.matmul, torch.backends
    before = matmul.fp32_precision
    if not tf32 or before == "tf32":
        yield
        return
    matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        # "none" is what follows the setting for all of torch, also when that changes later.
        matmul.fp32_precision = "none" if before == whole.fp32_precision else before


def rounds_anyway(dtype: torch.dtype) -> bool:
    """Return whether a layer of this dtype may have its scan in TF32."""
    return dtype in (torch.bfloat16, torch.float16)


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context in which products of fp32 stay in fp32 under autocast too, as in stock's scans."""
    return torch.autocast(tensor.device.type, enabled=False)
