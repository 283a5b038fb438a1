"""Where the features of images go in a row: found on the host, from ids that the collator had there.

A model of transformers asks the device how many placeholders a batch has, and again, in backward, where they are: it
then launches the backward pass of its tower only after that of its decoder is done.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.walk import modules_of
from fastpack_trl.vision.lengths import keep_on_host, on_host, read_once

_MASK = "get_placeholder_mask"


class _Mask(Tensor):
    """A mask of placeholders, (rows, tokens, 1) bool, that knows their places in all rows, (placeholders,) int64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.masked_scatter and len(args) == 3 and not kwargs and isinstance(args[1], cls):
            row, mask, features = args
            width, places = row.shape[-1], read_once(mask, _places)  # again if the mask was changed
            if mask.shape == (*row.shape[:-1], 1) and features.numel() == len(places) * width:
                return row.reshape(-1, width).index_copy(0, places, features.reshape(-1, width)).view(row.shape)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


@contextmanager
def placeholders_on_host(model: nn.Module) -> Iterator[None]:
    """Find the placeholders of rows on the host while the context is open, without waiting for the device."""
    with ExitStack() as stack:
        for module in modules_of(model):
            own = getattr(type(module), _MASK, None)
            if own is not None and _MASK not in vars(module):
                stack.enter_context(patch_attribute(module, _MASK, types.MethodType(_found_on_host(own), module)))
        yield


def _found_on_host(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)  # its name too, by which a model is pickled
    def masks(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input_ids, Tensor) and not torch.compiler.is_compiling() and _are_usual(input_ids, args, kwargs):
            thin = [_thin(each) for each in args], {name: _thin(each) for name, each in kwargs.items()}
            try:
                found = own(self, on_host(input_ids), *thin[0], **thin[1])
                if isinstance(found, tuple):
                    return tuple(_placed(mask, input_ids.device) for mask in found)
                return _placed(found, input_ids.device)
            except Exception:  # noqa: BLE001, S110 - whatever it is, the model's own call below raises it in its words
                pass
        return own(self, input_ids, *args, **kwargs)

    return masks


def _are_usual(ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    return len({each.shape[-1:] for each in others}) < 2 and all(each.device == ids.device for each in others)


def _thin(value: Any) -> Any:
    """Return a stand-in on the host for embeddings or features: as many rows, one column."""
    return torch.zeros(()).expand(*value.shape[:-1], 1) if isinstance(value, Tensor) and value.dim() else value


def _places(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero()[:, 0]


def _placed(mask: Tensor, device: torch.device) -> Tensor:
    if mask.dtype != torch.bool or mask.shape[2:] != (1,):
        raise TypeError("another kind of mask")
    moved: _Mask = _moved(mask, device).as_subclass(_Mask)
    keep_on_host(moved, _moved(_places(mask), device), _places)
    return moved


def _moved(made: Tensor, device: torch.device) -> Tensor:
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
