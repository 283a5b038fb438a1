"""Dense copies of frozen weights that are 4-bit, or in another dtype than the run computes in.

A copy costs 2 bytes per weight and saves, per use, reading the stored weight and writing the dense one: 2.6 bytes per
NF4 weight, 6 per fp32 weight. A step uses each weight three times (forward, recompute, backward), or twice where
activations are kept. The same memory spent on activations saves recomputes instead. By arithmetic, for a layer of
Qwen3-14B (330 M weights, 190 kB of activations per token) at 700 TFLOP/s and 3 TB/s, each GiB saves per step: NF4
copies ``3 * 2.6 / 2`` GiB of traffic, 1.4 ms; fp32 copies 3.2 ms; activations ``2 * 330e6 / 190e3`` operations per
byte, 5.3 ms. None of the three depends on the length of the row. So activations come first: copies are made only
where no layer is recomputed for want of memory, in what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastpack_trl.lora.base_weight import BaseWeight, from_4bit
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.upstream import Conv1D

_SHARE_OF_FREE = 0.25


class FrozenCopies:
    """The copies that the layers of a model could use; made by `keep`, bit-equal to what each use would make.

    Args:
        modules: layers with the fast forward.
        compute_dtype: the autocast dtype of the run; None: none.

    Attributes:
        kept: whether they are there.
        reason: why, or why not; empty where no layer needs one.
    """

    def __init__(self, modules: Sequence[Any] = (), compute_dtype: torch.dtype | None = None) -> None:
        found = ((module, _copy_dtype(module, compute_dtype)) for module in modules)
        self._wanted = [(module, dtype) for module, dtype in found if dtype is not None]
        self.kept = False
        self.reason = ""

    def __bool__(self) -> bool:
        """Return whether any layer needs a copy."""
        return bool(self._wanted)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, kept or not."""
        return sum(module.in_features * module.out_features * dtype.itemsize for module, dtype in self._wanted)

    def keep(self, reason: str = "") -> None:
        """Make the copies."""
        for module, dtype in self._wanted:
            weight = module.base_layer.weight
            base = from_4bit(weight) if type(module.base_layer).__name__ == "Linear4bit" else BaseWeight(weight.data)
            dense = base.dense(dtype)
            module.fastpack_dense = BaseWeight(dense.t() if isinstance(module.base_layer, Conv1D) else dense)
            module.fastpack_copied_from = (weight, weight._version, weight.data_ptr())
        self.kept = bool(self._wanted)
        self.reason = f"{_size(self.nbytes)} of frozen weights kept in the compute dtype{reason}"

    def keep_in(self, room: int, what: str) -> bool:
        """Make the copies if they take at most `room` bytes.

        Args:
            room: bytes that they may take.
            what: what leaves this room, for the reason.
        """
        if self.nbytes <= room:
            self.keep(f", of {_size(room)} that {what}")
        else:
            size = _size(self.nbytes)
            self.reason = f"frozen weights are made per use: copies take {size}, {_size(max(0, room))} {what}"
        return self.kept

    def keep_where_free(self) -> bool:
        """Make the copies if they take at most a quarter of the free device memory; never on the CPU."""
        device = self._wanted[0][0].base_layer.weight.device
        if device.type != "cuda":
            self.reason = f"frozen weights are cast per use ({device.type}; cache_dequantized='on' keeps them)"
            return False
        return self.keep_in(int(allocatable(device) * _SHARE_OF_FREE), "are a quarter of the free memory")

    def drop(self, reason: str) -> bool:
        """Free their memory; return False if there were none."""
        if not self.kept:
            return False
        for module, _ in self._wanted:
            module.__dict__.pop("fastpack_dense", None)
            module.__dict__.pop("fastpack_copied_from", None)
        self.kept, self.reason = False, reason
        return True


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.2f} MiB"


def _copy_dtype(module: Any, compute_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a copy that saves work; None if there is none to save."""
    base = module.base_layer
    kind = type(base).__name__
    if kind == "Linear4bit":
        dtype: torch.dtype | None = compute_dtype or base.compute_dtype
        return dtype
    if kind in ("Linear8bitLt", "FP8Linear") or compute_dtype is None or base.weight.dtype == compute_dtype:
        return None
    return None if base.weight.requires_grad else compute_dtype
