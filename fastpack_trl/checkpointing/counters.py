"""What a pass of a model does, counted operator by operator: operations of its matrix products, bytes alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.model.upstream import TorchDispatchMode, tree_leaves


def _sdpa_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Count attention whose keys have fewer heads than its queries, which torch 2.11's own formula refuses."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def _sdpa_backward_flops(_: Sequence[int], *shapes: Sequence[int], **__: Any) -> int:
    """Count its backward: the scores again, and two products for each of forward's."""
    query, key = shapes[:2]
    return 2 * _sdpa_flops(*shapes) + 2 * query[0] * query[1] * query[2] * key[2] * query[3]


_GROUPED_HEADS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{end}"): formula
    for kind in ("efficient", "flash", "cudnn")
    for end, formula in (("", _sdpa_flops), ("_backward", _sdpa_backward_flops))
}


class Products(NamedTuple):
    """Operations of the matrix products of a pass."""

    forward: float
    total: float
    """Of forward and backward, with what backward computes again."""


class ProductCounter(TorchDispatchMode):
    """Adds up operations by torch's formulas. `FlopCounterMode` also follows the modules, in three times the time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._formulas = FlopCounterMode(display=False, custom_mapping=_GROUPED_HEADS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        out = func(*args, **keywords)
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.total += formula(*args, **keywords, out_val=out)
        return out


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operators make, from their birth to their death.

    The allocator's own peak would be rounded to blocks: over a few tokens that is more than what a token adds.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most that was alive at once."""
        self._now = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage.data_ptr() not in given:
                self._born(storage)
        self.peak = max(self.peak, self._now)
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[place]
            self._now -= size

        self._alive[place] = weakref.ref(storage, died)
        self._now += size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.layout is torch.strided and value.untyped_storage().nbytes():
            yield value.untyped_storage()
