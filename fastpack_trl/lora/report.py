"""What `apply_lora` made of a model: the layers that it changed, and the dense copies of their frozen weights.

Copies are made of weights that are 4-bit, or in another dtype than the run computes in.
A copy costs 2 bytes per weight and saves, per use, reading the stored weight and writing the dense one: 2.6 bytes per
NF4 weight, 6 per fp32 weight. A step uses each weight three times (forward, recompute, backward), or twice where
activations are kept. The same memory spent on activations saves recomputes instead. By arithmetic, for a layer of
Qwen3-14B (330 M weights, 190 kB of activations per token) at 700 TFLOP/s and 3 TB/s, each GiB saves per step: NF4
copies ``3 * 2.6 / 2`` GiB of traffic, 1.4 ms; fp32 copies 3.2 ms; activations ``2 * 330e6 / 190e3`` operations per
byte, 5.3 ms. None of the three depends on the length of the row. So activations come first: copies are made only
where no layer is recomputed for want of memory, in what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fastpack_trl.lora.base_weight import BaseWeight, loaded_weight
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.upstream import LoraLayer

_SHARE_OF_FREE = 0.25

declined: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Layers with the fast forward that gave a call to PEFT, and the last reason. Beside the layers, so that no copy of a
model has it."""


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
            module._fastpack_keep_copy(BaseWeight(loaded_weight(module.base_layer).dense(dtype)))
        self.kept = bool(self._wanted)
        self.reason = f"{shown_bytes(self.nbytes)} of frozen weights kept in the compute dtype{reason}"

    def keep_in(self, room: int, what: str) -> None:
        """Make the copies if they take at most `room` bytes; `what` leaves this room, for the reason."""
        if self.nbytes <= room:
            self.keep(f", of {shown_bytes(room)} that {what}")
        else:
            size, room = shown_bytes(self.nbytes), max(0, room)
            self.reason = f"frozen weights are made per use: copies take {size}, {shown_bytes(room)} {what}"

    def keep_where_free(self) -> None:
        """Make the copies if they take at most a quarter of the free device memory; never on the CPU."""
        device = self._wanted[0][0].base_layer.weight.device
        if device.type != "cuda":
            self.reason = f"frozen weights are cast per use ({device.type}; cache_dequantized='on' keeps them)"
        else:
            self.keep_in(int(allocatable(device) * _SHARE_OF_FREE), "are a quarter of the free memory")

    def drop(self, reason: str) -> bool:
        """Free their memory; return False if there were none."""
        if not self.kept:
            return False
        for module, _ in self._wanted:
            module.__dict__.pop("fastpack_dense", None)  # also of a layer that has its own class again
            module.__dict__.pop("fastpack_copied_from", None)
        self.kept, self.reason = False, reason
        return True


def shown_bytes(nbytes: float) -> str:
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


def has_lora(model: nn.Module) -> bool:
    """Return whether any layer of the model is one of PEFT's LoRA layers."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@dataclass(slots=True)
class LoraReport:
    """Result of `apply_lora`: ``str(report)`` is one line, `revert` takes it back.

    Attributes:
        fast: names of the layers that have the fast forward.
        handed_over: names of the LoRA layers that stay PEFT's, by reason.
        on_parameters: names of LoRA on stacked parameters, as of experts: those are `apply_moe`'s.
        copies: of frozen weights in the compute dtype.
        already: how many had the fast forward before.
        modules: the layers of `fast`.
    """

    fast: list[str] = field(default_factory=list)
    handed_over: dict[str, list[str]] = field(default_factory=dict)
    on_parameters: list[str] = field(default_factory=list)
    copies: FrozenCopies = field(default_factory=FrozenCopies)
    already: int = 0
    modules: list[nn.Module] = field(default_factory=list, repr=False)
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    _casts: list[Any] = field(default_factory=list, repr=False)

    @property
    def call_by_call(self) -> dict[str, int]:
        """Number of fast layers that gave a call to PEFT since they were made, by reason."""
        return dict(Counter(declined[module] for module in self.modules if module in declined))

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Have backward passes in this context add the gradients of all adapters at once to those that are there.

        For micro-steps that are recorded: nobody's hook sees the accumulation of a gradient in them.
        """
        with ExitStack() as undo:
            for hook in self._casts:
                undo.enter_context(patch_attribute(hook, "adds_up", True))
            yield

    def revert(self) -> None:
        """Give every layer its class back and drop what was kept; a second call does nothing."""
        self._undo.close()

    def __str__(self) -> str:
        if not self.fast and not self.handed_over and not self.on_parameters:
            return f"{self.already} LoRA layers have the fast forward already" if self.already else "no LoRA layers"
        parts = [f"{len(self.fast)} of {len(self.fast) + sum(map(len, self.handed_over.values()))} LoRA layers"]
        if self.on_parameters:
            parts.append(f"{len(self.on_parameters)} on stacked parameters: see moe")
        if self.copies.reason:
            parts.append(self.copies.reason)
        parts += [f"PEFT's own: {len(names)} ({reason})" for reason, names in self.handed_over.items()]
        parts += [f"PEFT's own, call by call: {count} ({reason})" for reason, count in self.call_by_call.items()]
        return "; ".join(parts)
