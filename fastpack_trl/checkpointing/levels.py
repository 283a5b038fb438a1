"""Five levels of what a decoder layer keeps for its backward pass, and a model with one of them per layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.model.checkpoint_seam import CHECKPOINT
from fastpack_trl.model.patches import attribute_set
from fastpack_trl.model.upstream import GradientCheckpointingLayer, TorchDispatchMode, tree_leaves

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm", "linear")
)
_ATTENTION = frozenset(
    f"aten::{name}"
    for name in (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    )
)  # fmt: skip


class Level(IntEnum):
    """Activations that a layer keeps, from most to least, and so from no recompute to most."""

    KEEP = 0
    """All that autograd saves."""
    POINTWISE = 1
    """The layer's input and the results of matrix products and attention; element-wise work is computed again."""
    SELECTIVE = 2
    """The layer's input and the results of attention, as TRL's selective checkpointing."""
    CHECKPOINT = 3
    """The layer's input."""
    OFFLOAD = 4
    """Nothing on the device: the layer's input is in host memory."""

    def __str__(self) -> str:
        return self.name.lower()


def saves(level: Level, op: Any) -> bool:
    """Return whether `level` keeps the results of the operator `op`."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:  # what an operator writes into is not its own to keep
        return False
    name = str(schema.name)
    if name in _ATTENTION or "flash_attn" in name or (name.startswith("fastpack::") and name.endswith("_attention")):
        return level <= Level.SELECTIVE
    return level <= Level.POINTWISE and name in _PRODUCTS


def _policy(level: Level, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if saves(level, op) else CheckpointPolicy.PREFER_RECOMPUTE


class _Results(TorchDispatchMode):
    """Calls `seen` with every result that a level keeps."""

    def __init__(self, level: Level, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._level, self._seen = level, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if saves(self._level, func):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._seen(tensor)
        return out


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _contexts(level: Level, seen: Callable[[Tensor], None] | None) -> tuple[Any, Any]:
    forward, recompute = create_selective_checkpoint_contexts(functools.partial(_policy, level))
    return (forward if seen is None else _both(forward, _Results(level, seen))), recompute


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def level_function(level: Level, seen: Callable[[Tensor], None] | None = None) -> Callable[..., Any]:
    """Return the checkpoint function of a layer at `level`; that of `OFFLOAD` is that of `CHECKPOINT`.

    Args:
        seen: called with every tensor that is kept beside the layer's input, at the levels that keep some.
    """
    if level is Level.KEEP:
        return _call
    if level >= Level.CHECKPOINT:
        return functools.partial(checkpoint, use_reentrant=False)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=functools.partial(_contexts, level, seen))


@contextmanager
def layer_functions(
    layers: Sequence[GradientCheckpointingLayer], functions: Sequence[tuple[Callable[..., Any], bool]]
) -> Iterator[None]:
    """Give each layer its own checkpoint function, and whether it is called at all; both are restored afterwards."""
    with ExitStack() as stack:
        for layer, (function, enabled) in zip(layers, functions, strict=True):
            stack.enter_context(attribute_set(layer, CHECKPOINT, function))
            stack.enter_context(attribute_set(layer, "gradient_checkpointing", enabled))
        yield


@contextmanager
def layer_levels(
    layers: Sequence[GradientCheckpointingLayer], levels: Sequence[Level], **offload: Any
) -> Iterator[Offload | None]:
    """Put every layer at its level while the context is open; yield the offload where a layer has that level.

    Args:
        layers: all decoder layers, first to last.
        levels: one per layer.
        offload: arguments of `offload_checkpoints`.
    """
    with ExitStack() as stack:
        functions = [(level_function(level), level is not Level.KEEP) for level in levels]
        stack.enter_context(layer_functions(layers, functions))
        taken = [layer for layer, level in zip(layers, levels, strict=True) if level >= Level.CHECKPOINT]
        if Level.OFFLOAD not in levels:
            yield None
            return
        # Layers that keep their input on the device ask for the input before theirs ahead of time.
        kept = sum(level is Level.CHECKPOINT for level in levels)
        yield stack.enter_context(offload_checkpoints(taken, keep_last_layers=kept, **offload))


def describe(levels: Sequence[Level]) -> str:
    """Return the layers of each level in runs: ``"offload 0-11, checkpoint 12-31"``."""
    runs: list[list[Any]] = []
    for index, level in enumerate(levels):
        if runs and runs[-1][0] is level:
            runs[-1][2] = index
        else:
            runs.append([level, index, index])
    return ", ".join(f"{level} {first}" + (f"-{last}" if last > first else "") for level, first, last in runs)


def count(levels: Sequence[Level]) -> Mapping[Level, int]:
    """Return the number of layers per level."""
    return {level: levels.count(level) for level in Level if level in levels}
