"""Lengths of images and windows on the host: read once per batch, not once per layer.

transformers makes their ends from grids, in functions that read the grids. Here these get one copy on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def read_once(tensor: Any, read: Callable[[Tensor], Any]) -> Any:
    """Return what `read` makes of a tensor, which keeps it until it is changed; checkpoints pass the same object."""
    if torch.compiler.is_compiling():
        return read(tensor)
    version = None if tensor.is_inference() else tensor._version
    if getattr(tensor, "fastpack_read", (-1,))[0] != version:
        tensor.fastpack_read = version, {}
    known = tensor.fastpack_read[1]
    if read not in known:
        known[read] = read(tensor)
    return known[read]


def _lengths(ends: Tensor) -> tuple[int, ...]:
    return tuple(ends.diff().tolist())


def lengths_of(ends: Tensor) -> tuple[int, ...]:
    """Return the lengths between ends, (segments + 1,); waits for the device if a tower has made them on it."""
    found: tuple[int, ...] = read_once(ends, _lengths)
    return found


def keep_on_host(moved: Tensor, host: Tensor, read: Callable[[Tensor], Any] = Tensor.cpu) -> None:
    """Let `read_once` find what `read` makes of a tensor that was moved to a device, where it would wait for it."""
    if moved is not host and not moved.is_inference():
        moved.fastpack_read = moved._version, {read: host}


def on_host(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the host: those that `keep_on_host` knows, else read once."""
    found: Tensor = tensor if tensor.device.type == "cpu" else read_once(tensor, Tensor.cpu)
    return found


def made_on_host(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers' `vision_utils` that computes on the host what it makes of grids."""

    @functools.wraps(own)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1 or not args or args[0] is not given[0] or torch.compiler.is_compiling():
            return own(*args, **kwargs)
        found = own(on_host(args[0]), *args[1:], **kwargs)
        parts = [_moved(each, args[0].device) for each in (found if isinstance(found, tuple) else (found,))]
        return tuple(parts) if isinstance(found, tuple) else parts[0]

    return made


def _moved(made: Any, device: torch.device) -> Any:
    if not isinstance(made, Tensor):
        return made
    moved: Any = made.to(device, non_blocking=True)  # the driver has copied pageable memory when this returns
    if made.device.type == "cpu" and made.dtype == torch.int32 and made.dim() == 1:  # ends, as kernels take them
        moved.fastpack_read = None if moved.is_inference() else moved._version, {_lengths: _lengths(made)}
    return moved
