"""Matrices that are hard to quantize."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("plain", "zeros", "outlier", "subnormal", "nan", "infinite", "largest")


def matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return values of a kind of `KINDS`, (rows, columns); what a kind is about stands in the first row."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if kind == "zeros":
        x[0] = 0
    if kind == "outlier":
        x[0, 1] = 1e4
    if kind == "subnormal":
        x[0] *= 1e-40
    if kind == "nan":
        x[0, 2] = float("nan")
    if kind == "infinite":
        x[0, 2] = float("-inf")
    if kind == "largest":
        x[0] = torch.finfo(dtype).max
    return x.to(dtype)
