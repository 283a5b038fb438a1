"""Layers that usually read one tensor (q, k, v; gate, up), computed together without replacing the forward that calls.

The first that is called computes all. The others return their output if they get the very same tensor; otherwise they
are computed alone, and from the next forward on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from fastpack_trl.lora.adapters import autocasts, is_sharded
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight
from fastpack_trl.lora.nodes import project, version_of
from fastpack_trl.model.hooks import in_backward

_USUAL = (
    *(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3")),
    *(("q_a_proj", "kv_a_proj_with_mqa"), ("wi_0", "wi_1"), ("in_proj_qkvz", "in_proj_ba")),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""A guess, which each call confirms. Learned from a first forward, its roundings would differ from those of others."""


class Part(NamedTuple):
    """Tensors and constants of one call of a projection, in its compute dtype."""

    frozen: BaseWeight | Fp8Weight | None
    """The base weight; None for 8 bits, which bitsandbytes multiplies."""
    a: Tensor
    b: Tensor
    bias: Tensor | None
    dropout: nn.Module | None
    """None if it drops nothing."""
    dtype: torch.dtype
    result: torch.dtype

    def can_join(self, x: Tensor) -> bool:
        """Return whether the projection can share an autograd node with others of `x`."""
        if self.frozen is None or self.dropout is not None or is_sharded(self.a) or is_sharded(self.frozen.weight):
            return False
        return x.requires_grad or self.a.requires_grad or self.b.requires_grad


class Kept:
    """Outputs that siblings have not asked for yet: of one group at a time, and of the present forward.

    Attributes:
        since: autograd's sequence number at the beginning of the present forward of the backbone.
    """

    def __init__(self) -> None:
        self._leaf = torch.zeros(0, requires_grad=True)
        self.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def begin(self) -> None:
        """Begin a forward of the backbone; drop what one that raised has left, with its graph."""
        self._outputs, self._input = dict[Any, Tensor](), tuple[Any, ...]()
        self._owner: Siblings | None = None
        with torch.enable_grad():
            self.since = 1 + self._leaf.view(0).grad_fn._sequence_nr()

    def take(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return the output of a layer if it is here and was computed from `x`."""
        if layer in self._outputs:
            if self._input[0]() is x and self._input[1:] == _state(x):
                return self._outputs.pop(layer)
            self.put({}, x, None)
        return None

    def put(self, outputs: dict[Any, Tensor], x: Tensor, owner: Siblings | None) -> None:
        """Keep outputs for `x`; the owner of those that nobody asked for has failed (None: in a recompute)."""
        if self._outputs and self._owner is not None:
            self._owner.failed = self.since
        self._outputs, self._input, self._owner = outputs, (ref(x), *_state(x)), owner


def _state(x: Tensor) -> tuple[int, bool, bool]:
    return version_of(x), autocasts(x.device.type), torch.is_grad_enabled()


class Siblings:
    """Layers of one parent that may read one tensor.

    Attributes:
        is_joint: whether some were computed together.
        failed: beginning of the last forward in which they read different tensors, or 0.
    """

    def __init__(self, kept: Kept, layers: Sequence[Any]) -> None:
        self.kept, self.layers, self.is_joint, self.failed, self._split = kept, layers, False, 0, 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the layers of a copy are computed alone

    def project(self, layer: Any, x: Tensor, own: Part) -> Tensor | None:
        """Return the output of a layer, whose part is `own`; None if it must be computed alone."""
        recomputes = in_backward()
        if not torch.is_grad_enabled() or self._is_split(recomputes) or not own.can_join(x):
            return None
        found = {each: own if each is layer else each.fastpack_part(x) for each in self.layers}
        parts = {each: part for each, part in found.items() if part is not None and part.can_join(x)}
        if len(parts) == 1:
            return None
        outs = project(x if x.dtype == own.dtype else x.to(own.dtype), [*parts.values()])
        outputs = {each: out.to(part.result) for (each, part), out in zip(parts.items(), outs, strict=True)}
        out, self.is_joint = outputs.pop(layer), True
        self.kept.put(outputs, x, None if recomputes else self)
        return out

    def _is_split(self, recomputes: bool) -> bool:
        """Return whether the layers are computed alone; a recompute gets the answer of its forward.

        A checkpoint compares what both save. The node that runs belongs to the forward that is recomputed.
        """
        node = torch._C._current_autograd_node() if recomputes else None
        if node is None and not self._split and self.failed not in (0, self.kept.since):
            self._split = self.kept.since
        return bool(self._split) and (node is None or node._sequence_nr() >= self._split)


def find_siblings(names: Sequence[str], layers: Sequence[Any], kept: Kept) -> list[Siblings]:
    """Set ``layer.fastpack_siblings`` of the layers in `_USUAL` that share a parent and the width of their input."""
    by_name, result = dict(zip(names, layers, strict=True)), []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for usual in _USUAL:
            group = [by_name[path] for name in usual if (path := f"{parent}.{name}") in by_name]
            if len(group) > 1 and len({layer.in_features for layer in group}) == 1:
                result.append(Siblings(kept, group))
                for layer in group:
                    layer.__dict__["fastpack_siblings"] = result[-1]
    return result
