"""Which tensors are all zero, with few waits for the device: a read of each would take as long as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def have_values(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether any of its numbers is not zero; NaN is not.

    The first numbers are read at once, then all of those tensors that begin with zero, for each device and dtype.
    """
    found = [False] * len(tensors)
    for look in (lambda tensor: tensor[(0,) * tensor.dim()], Tensor.any):
        groups: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if tensor.numel() and not found[index]:
                groups.setdefault((tensor.device, tensor.dtype), []).append(index)
        for group in groups.values():
            values = torch.stack([look(tensors[index]) for index in group]).tolist()
            for index, value in zip(group, values, strict=True):
                found[index] = bool(value)
    return found
