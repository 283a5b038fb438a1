"""Projections that read one input: which ones, and the way of one product through the calls of several modules.

The first of them computes the outputs of all, the others take theirs if they are given the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastpack_trl.lora.base_weight import BaseWeight
from fastpack_trl.lora.joined import joined_projection
from fastpack_trl.lora.joined_casts import JoinedCast
from fastpack_trl.lora.projection import is_small
from fastpack_trl.model.checkpoint_seam import checkpointing_modules
from fastpack_trl.model.hooks import in_backward, is_hooked
from fastpack_trl.model.source import children_of_one_input
from fastpack_trl.model.upstream import Conv1D

logger = logging.get_logger(__name__)

MOST_RANKS = 256
"""Sum of the ranks of a group: joined Bs are multiplied with their zeros, as often as there are projections."""


class Siblings:
    """LoRA layers of one module whose forward gives them one input, in the order in which it calls them.

    Whether a call is joined depends on the casts of its forward and on what it is given, on nothing else: a checkpoint
    recomputes a layer the way it ran.

    Args:
        modules: with the fast forward.
        layer: around them, which checkpoints where its ``gradient_checkpointing`` says so.

    Attributes:
        alone: why they run one by one from the next forward of the backbone on; empty while they are joined.
    """

    def __init__(self, modules: Sequence[Any], layer: Any = None) -> None:
        self.modules, self._layer = list(modules), layer
        self.alone = ""
        self._source: Tensor | None = None
        self._version = 0
        self._outs: list[Tensor] = []
        self._left = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # in a copy of the model they run one by one

    def project(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return the output of a call of one of them, None where it is to run by itself.

        Args:
            layer: that is called; not one of `modules` in a replica of the model.
            x: its input.
        """
        place: int = layer.fastpack_place
        if layer is not self.modules[place] or not isinstance(layer.fastpack_cast, JoinedCast):
            return None
        if not torch.is_grad_enabled():  # evaluation between two steps, whose casts are still there
            return None
        if place == 0:
            self._begin(x, layer.fastpack_cast)
        elif self._source is not x or self._version != _version(x):
            if self._source is not None:
                self._run_alone("one of them was given another input")
            return None
        if self._source is None:
            return None
        out = self._outs[place]
        self._left -= 1
        if self._left == 0:
            self.forget()
        return out

    def forget(self) -> None:
        """Let go of outputs that were not taken, as after a forward that has failed."""
        self._source, self._outs, self._left = None, [], 0

    @property
    def are_checkpointed(self) -> bool:
        """True where their layer is recomputed: no compiled checkpoint lets a call leave something for another."""
        return self._layer is not None and bool(self._layer.gradient_checkpointing)

    def _run_alone(self, reason: str) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self.alone = self.alone or reason
            logger.warning_once(f"lora: projections of one input run one by one ({reason})")

    def _begin(self, x: Tensor, cast: JoinedCast) -> None:
        if self._source is not None:
            self._run_alone("one of them was not called")
        self.forget()
        found = [module._fastpack_adapter(x) for module in self.modules]
        dtype = cast.a.dtype
        if any(each is None or each[3] is not None or each[5] != dtype for each in found):
            self._run_alone("dropout, or one of them is not fast")
            return
        if any(map(is_hooked, self.modules)):
            self._run_alone("hooks on one of them")
            return
        if not cast.serves_all([each[:3] for each in found], dtype):
            return
        bases = [
            module._fastpack_frozen(type(each[4]).__name__, each[4]._parameters["weight"], dtype)
            for module, each in zip(self.modules, found, strict=True)
        ]
        if not all(isinstance(base, BaseWeight) and base.absmax is None for base in bases):
            self._run_alone("a frozen weight that is not dense")
            return
        biases = [each[4]._parameters["bias"] for each in found]
        if any((bias is None) != (biases[0] is None) for bias in biases):
            self._run_alone("a bias on some of them only")
            return
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
        rows = x if x.dtype == dtype else x.to(dtype)
        ranks = [each[0].shape[0] for each in found]
        weights = [base.weight for base in bases]
        by_torch = not torch.compiler.is_compiling() and is_small(rows)
        self._outs = joined_projection(rows, weights, cast.a, cast.b, ranks, biases, by_torch=by_torch)
        self._source, self._version, self._left = x, _version(x), len(self.modules)


def _version(x: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() else x._version


def find_siblings(model: nn.Module, fast: Sequence[Any]) -> list[Siblings]:
    """Return the groups among LoRA layers with the fast forward, as the forwards of their parents show them."""
    known = {id(module) for module in fast}
    layer_of = {id(module): layer for layer in checkpointing_modules(model) for module in layer.modules()}
    groups = []
    for parent in model.modules():
        children = {name: child for name, child in parent._modules.items() if id(child) in known and _may_join(child)}
        if len(children) < 2 or "forward" in parent.__dict__:
            continue
        kind: Any = type(parent)
        for names in children_of_one_input(kind, frozenset(children)):
            members = [children[name] for name in names]
            if len({member.in_features for member in members}) == 1 and _ranks(members) <= MOST_RANKS:
                groups.append(Siblings(members, layer_of.get(id(parent))))
    return groups


def _may_join(layer: Any) -> bool:
    """Return whether a layer has a dense base and no dropout: these may become otherwise, and are then asked again."""
    dropouts = layer.lora_dropout.values()
    return type(layer.base_layer) in (nn.Linear, Conv1D) and not any(getattr(each, "p", 0.0) for each in dropouts)


def _ranks(members: Sequence[Any]) -> int:
    return sum(max(layer.r.values(), default=0) for layer in members)
