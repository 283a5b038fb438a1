"""What stock asks all modules of a model in each step of a trainer that scores completions, from a list of them.

Switching adapters off for the reference walks over the model nine times, clipping, resetting gradients and counting
operations once each: at Qwen3-0.6B with LoRA some 50 ms of the host, where the device works 65 ms on 8 pairs.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.upstream import BaseTunerLayer, LoraLayer, resolve
from fastpack_trl.step.hostwork import FlopsPerToken, GradientReset, ModelContents


class HostWork:
    """The lists of one run; inside of `running` they stand for the walks.

    Attributes:
        active: inside of `running`.
    """

    def __init__(self) -> None:
        self.active = False
        self._forget()

    def _forget(self) -> None:
        self.contents = ModelContents()
        self.reset, self.flops = GradientReset(self.contents), FlopsPerToken(self.contents)
        self._layers: list[Any] | None = None
        self._version: int | None = None

    @contextlib.contextmanager
    def running(self, trainer: Any) -> Iterator[None]:
        """Stand in for the walks over ``trainer.model`` until the context ends."""
        model = trainer.model
        self._forget()  # lists of the run before are of another time
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.contents.watched())
            stack.callback(self.reset.remove)
            self.reset.install(trainer, model)
            self.contents.refresh(model)
            if hasattr(type(model), "disable_adapter") and "disable_adapter" not in vars(model):
                stack.enter_context(patch_attribute(model, "disable_adapter", self._lean_switch(model)))
            stack.enter_context(patch_attribute(self, "active", True))
            yield

    def _lean_switch(self, model: nn.Module) -> Any:
        """Return ``disable_adapter`` for `model` that sets one attribute of each LoRA layer where that is all it takes.

        Stock also takes the adapters' ``requires_grad`` away and gives it back, which shows where gradients are on.
        """
        owner, ours = weakref.ref(model), weakref.ref(self)  # a deep copy of the model has this method too

        @contextlib.contextmanager
        def disable_adapter(self: Any) -> Iterator[None]:
            host = ours()
            layers = None if host is None or self is not owner() else host._plain_layers(self)
            if torch.is_grad_enabled() or layers is None:
                with type(self).disable_adapter(self):
                    yield
                return
            with contextlib.ExitStack() as switched:
                for layer in layers:
                    switched.enter_context(patch_attribute(layer, "_disable_adapters", True))
                switched.enter_context(patch_attribute(self, "_adapters_disabled", True))
                yield

        return types.MethodType(disable_adapter, model)

    def _plain_layers(self, model: nn.Module) -> list[Any] | None:
        """Return the layers with adapters; None where they are not LoRA alone, enabled, and trained."""
        if self._version != self.contents.refresh(model):
            self._version, wrapper = self.contents.version, resolve("peft.utils.other.AuxiliaryTrainingWrapper")
            layers = [module for module in self.contents.modules if isinstance(module, BaseTunerLayer)]
            plain = wrapper is not None and not any(isinstance(module, wrapper) for module in self.contents.modules)
            plain = plain and hasattr(model, "_adapters_disabled") and hasattr(BaseTunerLayer, "_disable_adapters")
            # Without any it is prompt learning, which is switched off elsewhere.
            plain = plain and bool(layers) and all(isinstance(layer, LoraLayer) for layer in layers)
            self._layers = layers if plain else None
        changed = any(layer.disable_adapters or not _is_trained(layer) for layer in self._layers or ())
        return None if changed else self._layers


def _is_trained(layer: Any) -> bool:
    """Return whether the active adapters of a layer all train, and no other does: so stock leaves them."""
    active = layer.active_adapters
    return all(
        parameter.requires_grad == (name in active)
        for kind in (layer.lora_A, layer.lora_B)
        for name, part in kind.items()
        for parameter in part._parameters.values()
        if parameter is not None
    )
