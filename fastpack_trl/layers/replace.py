"""Fused forwards for the modules of one model, in a context that restores them.

The class that defines a forward asks each instance for a mark, so that other models, copies and the model after the
context run the library's code. A rotation is a function in the namespace of a modelling file: it asks for the attention
layer that runs on this thread.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fastpack_trl.layers.find import OWN, kinds_of
from fastpack_trl.layers.forms import NormCall, Precision, RotaryCall, accept
from fastpack_trl.layers.pending import active
from fastpack_trl.model.changes import Patch, patch_attribute, shared
from fastpack_trl.model.facts import text_model, token_table

PARTS = ("norm", "rotary", "gate")
_MARK = "_fastpack_fused"


@dataclass
class FusedLayers:
    """What is fused: ``norm 113 of 113, rotary 28 of 28, gate 28 of 28``.

    Attributes:
        fused, found: number of modules by part.
        reasons: why a class runs its own code, ``{"T5LayerNorm": "..."}``.
    """

    fused: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = ", ".join(f"{part} {self.fused[part]} of {self.found[part]}" for part in PARTS if self.found[part])
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{counts} ({reasons})" if reasons else counts


@contextmanager
def fused_layers(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    autocast: bool,
    gathers: bool = False,
    device: torch.device | None = None,
) -> Iterator[FusedLayers]:
    """Run fused norms, rotations and gates in the layers of `model` whose classes prove equal on its device.

    Args:
        dtype: that the run computes in.
        autocast: the dtype is that of autocast, else that of the weights.
        gathers: weights are sharded and gathered in it.
        device: that the run computes on, if the weights come there later, as under FSDP 2.
    """
    table = token_table(text_model(model)).weight
    precision = Precision(dtype, autocast, device or table.device, table.dtype, gathers)
    report = FusedLayers()
    kinds, refused = kinds_of(model)
    for part, name, reason in refused:
        report.found[part] += 1
        report.reasons.setdefault(name, reason)
    calls = dict[nn.Module, Any]()
    with ExitStack() as stack:
        for kind in kinds.values():
            report.found[kind.part] += len(kind.modules)
            call, reason = accept(kind, precision)
            if call is None:
                report.reasons.setdefault(kind.name, reason)
                continue
            report.fused[kind.part] += len(kind.modules)
            for home, name in kind.rotary:
                install = partial(patch_attribute, home, name, _turning(name, vars(home)[name]))
                stack.enter_context(shared(home, f"_fastpack_{name}", install))
            install = partial(patch_attribute, kind.owner, "forward", _marked(kind.owner, vars(kind.owner)["forward"]))
            stack.enter_context(shared(kind.owner, "_fastpack_forward", install))
            calls.update((module, (kind.owner, call)) for module in kind.modules)
        norms = {module: call for module, (_, call) in calls.items() if isinstance(call, NormCall)}
        layers = {child: layer for layer in model.modules() for child in layer.children()}
        for module, (owner, call) in calls.items():
            if isinstance(call, RotaryCall):
                heads = [each for each in module.children() if each in norms and norms[each].is_of_heads(each)]
                after = [each for each in layers[module].children() if each in norms]
                call = RotaryCall(call.turns, tuple(heads), tuple(after))
            stack.enter_context(patch_attribute(module, _MARK, Patch((owner, call))))
        yield report


def _marked(owner: type, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler fuses the library's code itself. Copies of a module have None as their mark.
        mark = None if torch.compiler.is_compiling() else self.__dict__.get(_MARK)
        if mark is None or mark.value[0] is not owner:
            return forward(self, *args, **kwargs)
        return mark.value[1](self, forward, *args, **kwargs)

    return marked


def _turning(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def turning(*args: Any, **kwargs: Any) -> Any:
        turn = None if torch.compiler.is_compiling() else active.turns.get(name)
        return own(*args, **kwargs) if turn is None or len(args) != 4 or kwargs else turn(*args)

    OWN[turning] = own
    return turning
