"""`LoraReport`: the layers that `apply_lora` changed, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from fastpack_trl.lora.copies import FrozenCopies

declined: MutableMapping[nn.Module, str] = WeakKeyDictionary()
"""Layers with the fast forward that gave a call to PEFT, and the last reason. Beside the layers, so that no copy of a
model has it."""


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
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def call_by_call(self) -> dict[str, int]:
        """Number of fast layers that gave a call to PEFT since they were made, by reason."""
        return dict(Counter(declined[module] for module in self.modules if module in declined))

    def revert(self) -> None:
        """Give every layer its class back and drop what was kept; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

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
