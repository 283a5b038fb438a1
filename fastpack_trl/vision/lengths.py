"""Lengths of images and windows on the host: read once per batch, not once per layer.

transformers makes the ends of images and windows from their grids, in functions that read the grids. Here they get a
copy on the host, so that one read serves all of them, and what they return goes to the device without a wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_MOST = 64
_read: dict[Any, tuple[Tensor, int, Any]] = {}
"""What was read of the latest tensors. It keeps them, so that no other tensor gets their memory; a recompute finds
the lengths of its forward."""


def _once(what: str, tensor: Tensor, read: Callable[[Tensor], _T]) -> _T:
    if tensor.is_inference():  # has no version that tells of changes
        return read(tensor)
    key = what, tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    found = _read.get(key)
    if found is None or found[1] != tensor._version:
        found = _read[key] = tensor, tensor._version, read(tensor)
        while len(_read) > _MOST:
            _read.pop(next(iter(_read)), None)
    result: _T = found[2]
    return result


def lengths_of(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return the lengths between ends, (segments + 1,); waits for the device if a tower makes new ends on it."""
    if torch.compiler.is_compiling():
        return _lengths(cu_seqlens)
    return _once("lengths", cu_seqlens, _lengths)


def _lengths(ends: Tensor) -> tuple[int, ...]:
    return tuple(ends.diff().tolist())


def forget() -> None:
    """Drop what was read."""
    _read.clear()


def made_on_host(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers' `vision_utils` that computes on the host what it makes of grids."""

    @functools.wraps(own)
    def made(*args: Any, **kwargs: Any) -> Any:
        given: list[Tensor] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1 or not args or args[0] is not given[0] or torch.compiler.is_compiling():
            return own(*args, **kwargs)
        host = _once("grids", given[0], Tensor.cpu)
        return _moved(own(host, *args[1:], **kwargs), given[0].device)

    return made


def _moved(made: Any, device: torch.device) -> Any:
    if isinstance(made, tuple):
        return tuple(_moved(each, device) for each in made)
    if not isinstance(made, Tensor):
        return made
    moved = made.to(device, non_blocking=True)  # the driver has copied pageable memory when this returns
    if made.device.type == "cpu" and made.dtype == torch.int32 and made.dim() == 1:  # ends, as kernels take them
        _once("lengths", moved, lambda _: _lengths(made))
    return moved
