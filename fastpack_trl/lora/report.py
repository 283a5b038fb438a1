"""Report of `apply_lora`: the layers that it changed, and the dense copies of their frozen weights.

A copy costs 2 bytes per weight and saves, per use, reading the stored weight and writing the dense one: 2.6 bytes per
NF4 weight, 6 per fp32 weight. Per GiB that is 1.4 ms of a step for NF4 (at 3 TB/s, three uses), where activations that
are not recomputed save 5.3 ms. So copies are kept only if all of them are small relative to the free memory.
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

declined: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Layers with the fast forward that handed a call to PEFT, and the last reason; copies of a model do not share it."""


def keep_copies(modules: Sequence[Any], compute_dtype: torch.dtype | None) -> str:
    """Keep dense copies of frozen weights if all fit an eighth of the free device memory; return the remark.

    They are bit-equal to the weights dequantized per use. None are kept on the CPU. `compute_dtype`: of autocast.
    """
    dtypes = ((module, _copy_dtype(module.base_layer, compute_dtype)) for module in modules)
    wanted = [(module, dtype) for module, dtype in dtypes if dtype is not None]
    if not wanted or (budget := copy_budget(wanted[0][0].base_layer.weight.device)) is None:
        return ""
    nbytes = sum(module.in_features * module.out_features * dtype.itemsize for module, dtype in wanted)
    if nbytes > budget:
        size, free = shown_bytes(nbytes), shown_bytes(budget)
        return f"frozen weights are converted per use: copies need {size}, an eighth of the free memory is {free}"
    for module, dtype in wanted:
        module._fastpack_keep_copy(BaseWeight(loaded_weight(module.base_layer).dense(dtype)))
    return f"{shown_bytes(nbytes)} of frozen weights kept in the compute dtype"


def copy_budget(device: torch.device) -> int | None:
    return allocatable(device) // 8 if device.type == "cuda" else None


def shown_bytes(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.2f} MiB"


def _copy_dtype(base: Any, compute_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a copy that saves work; None if a copy saves nothing."""
    if type(base).__name__ == "Linear4bit":
        dtype: torch.dtype | None = compute_dtype or base.compute_dtype
        return dtype
    needless = type(base).__name__ == "Linear8bitLt" or base.weight.dtype == compute_dtype or base.weight.requires_grad
    return None if needless else compute_dtype


def has_lora(model: nn.Module) -> bool:
    """Return whether any layer of the model is one of PEFT's LoRA layers."""
    return any(isinstance(module, LoraLayer) for module in model.modules())


@dataclass(slots=True)
class LoraReport:
    """Result of `apply_lora`: ``str(report)`` is one line, `revert` restores the model.

    Attributes:
        fast: names of the layers that have the fast forward.
        handed_over: names of the LoRA layers that run PEFT's code, by reason.
        on_parameters: names of LoRA on stacked parameters such as experts, which `apply_moe` handles.
        copies: remark on copies of frozen weights; empty if no layer needs one.
        already: number of layers that had the fast forward before.
        modules: the layers of `fast`.
        siblings: groups of layers that may read one input and are then computed together.
    """

    fast: list[str] = field(default_factory=list)
    handed_over: dict[str, list[str]] = field(default_factory=dict)
    on_parameters: list[str] = field(default_factory=list)
    copies: str = ""
    already: int = 0
    modules: list[nn.Module] = field(default_factory=list, repr=False)
    siblings: list[Any] = field(default_factory=list, repr=False)
    _undo: ExitStack = field(default_factory=ExitStack, repr=False)
    _casts: list[Any] = field(default_factory=list, repr=False)

    @property
    def call_by_call(self) -> dict[str, int]:
        """Number of fast layers that handed a call to PEFT since they were made, by reason."""
        return dict(Counter(declined[module] for module in self.modules if module in declined))

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Have backward passes in this context add the gradients of all adapters at once to existing gradients.

        For recorded micro-steps, in which no user hook sees the accumulation of a gradient.
        """
        with ExitStack() as undo:
            for hook in self._casts:
                undo.enter_context(patch_attribute(hook, "adds_up", True))
            yield

    def revert(self) -> None:
        """Restore the class of every layer and drop all copies; a second call does nothing."""
        self._undo.close()

    def __str__(self) -> str:
        if not self.fast and not self.handed_over and not self.on_parameters:
            return f"{self.already} LoRA layers have the fast forward already" if self.already else "no LoRA layers"
        parts = [f"{len(self.fast)} of {len(self.fast) + sum(map(len, self.handed_over.values()))} LoRA layers"]
        if self.on_parameters:
            parts.append(f"{len(self.on_parameters)} on stacked parameters: see moe")
        parts += [self.copies] * bool(self.copies)
        failed = [group.failed > 0 for group in self.siblings if group.is_joint]
        parts += [f"{failed.count(False)} groups of one input computed together"] * (False in failed)
        parts += [f"{sum(failed)} groups computed one by one, because they read different tensors"] * (True in failed)
        parts += [f"PEFT's own: {len(names)} ({reason})" for reason, names in self.handed_over.items()]
        parts += [f"PEFT's own, call by call: {count} ({reason})" for reason, count in self.call_by_call.items()]
        return "; ".join(parts)
