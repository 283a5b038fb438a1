"""A few decoder layers that stand for all of them in a trace: most layers of a model differ in their weights only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor, nn

from fastpack_trl.checkpointing.levels import layer_functions
from fastpack_trl.model.facts import window_of
from fastpack_trl.model.upstream import GradientCheckpointingLayer

Value = TypeVar("Value")

SAMPLED = 4
"""Layers that are enough; more only where there are more kinds of them."""
_TOLERANCE = 0.1  # of the bytes that layers of one kind keep: experts differ by who is routed where
_OWN = frozenset({"layer_idx", "training"})
_NUMBER = re.compile(r"\d+")


class LayerSample:
    """Layers that run in a trace, and for each layer of the model the one that stands for it.

    Args:
        layers: of the model, first to last.
        kinds: of each layer; layers of equal kinds do the same on other weights.
        size: layers that are enough.
    """

    def __init__(self, layers: Sequence[GradientCheckpointingLayer], kinds: Sequence[Any], size: int = SAMPLED) -> None:
        self.layers = layers
        groups: dict[Any, list[int]] = {}
        for index, kind in enumerate(kinds):
            groups.setdefault(kind, []).append(index)
        # In the proportions of the model, since passes are timed. Last ones: a layer's backward is measured where all
        # others have what they keep.
        shares = {kind: max(1, round(size * len(group) / len(kinds))) for kind, group in groups.items()}
        self.taken = sorted(index for kind, group in groups.items() for index in group[-shares[kind] :])
        """Indices of the layers that run, first to last; the model's last one is among them."""
        self._stands = [self.taken.index(groups[kind][-1]) for kind in kinds]

    @classmethod
    def of_all(cls, layers: Sequence[GradientCheckpointingLayer]) -> LayerSample:
        """Return the sample in which each layer stands for itself."""
        return cls(layers, range(len(layers)))

    @property
    def whole(self) -> bool:
        """Return whether all layers run."""
        return len(self.taken) == len(self._stands)

    def of_taken(self, per_layer: Sequence[Value]) -> list[Value]:
        """Return the values of the layers that run, of one per layer of the model."""
        return [per_layer[index] for index in self.taken]

    def for_all(self, per_taken: Sequence[Value]) -> list[Value]:
        """Return a value per layer of the model, of one per layer that runs."""
        if self.whole:
            return list(per_taken)
        return [per_taken[index] for index in self._stands]

    def run_with(self, make: Callable[[], Callable[..., Any]]) -> AbstractContextManager[None]:
        """Give layers that run a checkpoint function, and let the others hand on their input.

        Args:
            make: returns the function of the next layer that runs.
        """
        taken = set(self.taken)
        functions = [make() if index in taken else _hand_on for index in range(len(self.layers))]
        return layer_functions(self.layers, [(function, True) for function in functions])

    def stands(self, alone: Sequence[int], whole: Sequence[int]) -> bool:
        """Return whether layers keep as many bytes as those that stand for them.

        Args:
            alone: bytes per layer that runs, others left out.
            whole: bytes per layer where all run.
        """
        return all(abs(a - b) <= _TOLERANCE * b for a, b in zip(self.for_all(alone), whole, strict=True))


def _hand_on(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def kind_of(layer: nn.Module) -> Any:
    """Return what makes a layer another kind of layer: modules, windows, plain attributes, shapes and types of tensors.

    The attributes tell adapters, shared keys and values; one that has another value in each layer makes each a kind of
    its own. Of attributes of ours only the type: they hold addresses.
    """
    kind: list[Any] = []
    for module in layer.modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        kind.append(type(module))
        kind.append(window_of(module) if hasattr(module, "config") and hasattr(module, "layer_idx") else None)
        kind.append(tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors))
        read = {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _OWN}
        own = ((name, type(value) if name.startswith("fastpack_") else _plain(value)) for name, value in read.items())
        kind.append(tuple(sorted(own, key=lambda pair: pair[0])))
    return tuple(kind)


def _plain(value: Any) -> Any:
    """Return a number or text, or what such are in; of anything else its type."""
    if isinstance(value, str):
        return _NUMBER.sub("#", value)  # PEFT keeps the module's name: "model.layers.3.mlp.up_proj"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((str(name), _plain(part)) for name, part in value.items())
    return type(value)
