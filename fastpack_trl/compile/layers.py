"""One compiled graph per kind of decoder layer: `torch.compile` of a layer is small, and its copies share it.

Where the compiled function is hooked in. `accelerate.utils.compile_regions` replaces each block by an
`OptimizedModule`, which renames the parameters of a saved state (``_orig_mod``); an instance attribute ``forward``
would travel with a pickled or copied model. Here each layer gets torch's own slot for this, ``_compiled_call_impl``
(what `nn.Module.compile` sets): its hooks stay, and torch drops it when a module is copied or pickled. In the slot lies
not the compiled layer but `_Call`, which runs everything but a packed training row uncompiled: evaluation, `generate`
and padded batches neither run compiled nor cause a recompile.

A checkpointed layer calls its checkpoint function with its own forward, above `__call__` in older transformers and
below it in 5.23; so that function is wrapped as well (`model.checkpoint_seam`). The checkpoint is compiled together
with the layer (what is computed again is then chosen per operator, and fused), unless it is not torch's plain one or
saved-tensor hooks are around it: offloading needs the checkpoint at run time, and what it runs is compiled instead.

Under FSDP 2 the hooks of a layer gather its parameters before it runs and shard them again afterwards. They stay
outside of the compiled function: there the layer gets a ``forward`` of its own (`_Call`), in the slot's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from fastpack_trl.compile.graph import packed_call
from fastpack_trl.compile.kind import CompiledLayers, LayerKind, LayerRun
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import (
    Nesting,
    checkpoint_wrapped,
    checkpoints_inside_hooks,
    layer_keywords,
    stock_checkpoint,
)
from fastpack_trl.model.facts import attention_modules, mixers, text_model, window_of
from fastpack_trl.model.upstream import GradientCheckpointingLayer


@contextlib.contextmanager
def compiled_layers(
    model: nn.Module,
    *,
    left: Callable[[], StepsLeft | None] | None = None,
    hooks_outside: bool = False,
    on_change: Callable[[CompiledLayers], None] | None = None,
    _backend: str | Callable[..., Any] = "inductor",
) -> Iterator[CompiledLayers]:
    """Compile the decoder layers of `model`, one graph per kind, when they first see a packed training row.

    To be used around training with `packed_attention`, which gives the layers their packed rows. Every other call
    (evaluation, `generate`, padded batches) runs the layers as they are. On exit, also after an exception, they are as
    before; a copy or a saved state never contains anything of this.

    ```python
    with packed_attention(trainer.model), compiled_layers(trainer.model) as layers:
        trainer.train()
    print(layers.path, layers.reason)
    ```

    A layer that cannot be compiled (no compiler, control flow that depends on data, more shapes than torch's
    `recompile_limit`) runs as it is, named once in the log and in `CompiledLayers.reason`; so does a layer while a
    module hook of the user, also a global one, is on it or inside.

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        left: returns the remaining steps of the run, None while it is too early to decide. Layers are compiled only if
            that pays back (`measure.payback`). None: compile however many are left.
        hooks_outside: compile the layers' own forwards, beneath their hooks. For FSDP 2, whose hooks gather the
            parameters of a layer before it runs; the model may be sharded meanwhile.
        on_change: called with the yielded object whenever a kind was decided.

    Raises:
        ValueError: `model` has no decoder layers that call transformers' attention interface.
    """
    import torch._dynamo.config as config  # takes a second to load: only where layers are compiled

    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers with packed attention: set layer_compile='off'")
    names = {module: name for name, module in model.named_modules() if module in layers}
    handle = CompiledLayers(names, _backend, left, on_change)
    groups: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        if layer._compiled_call_impl is None:  # otherwise it is compiled already
            groups.setdefault(_structure(layer), []).append(layer)
    handle.kinds = [LayerKind(group, handle) for group in groups.values()]
    with contextlib.ExitStack() as stack:
        # Else torch 2.11 takes a parameter for unchanged while its module has the same one: unfrozen after a graph was
        # traced, it would get no gradient for the rest of the run.
        if hasattr(config, name := "skip_tensor_guards_with_matching_dict_tags"):
            stack.enter_context(config.patch({name: False}))
        for kind in handle.kinds:
            for layer in kind.members:
                stack.enter_context(_Call(layer, kind, handle, hooks_outside).installed())
        yield handle


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of module lists that hold the attention modules and mixers of the text decoder."""
    base = text_model(model)
    mixing = {id(module) for module in (*attention_modules(base), *mixers(base))}
    layers: dict[int, nn.Module] = {}
    for stack in base.modules():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            if any(id(module) in mixing for module in layer.modules()):
                layers.setdefault(id(layer), layer)
    inner = {id(module) for layer in layers.values() for module in layer.modules() if module is not layer}
    return [layer for key, layer in layers.items() if key not in inner]


def _structure(layer: nn.Module) -> Any:
    """Return the values that a graph depends on besides shapes: classes of the modules and windows of attention."""
    modules = list(layer.modules())
    windows = [window_of(module) for module in modules if hasattr(module, "config") and hasattr(module, "layer_idx")]
    return tuple(map(type, modules)), tuple(windows)


class _Call:
    """What runs in place of a layer's call, and in its checkpoint.

    With `hooks_outside` it is the layer's own ``forward``, which torch calls between the hooks; no copy travels with
    it: FSDP allows none, and gives the layer another class meanwhile, so that the class is looked up in each call.
    """

    def __init__(self, layer: Any, kind: LayerKind, layers: CompiledLayers, hooks_outside: bool) -> None:
        self._layer, self._kind, self._layers, self._hooks_outside = layer, kind, layers, hooks_outside
        # Else a checkpoint runs what stands in the layer's place.
        self._in_checkpoint = checkpoints_inside_hooks() or not hooks_outside

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        slot = "forward" if self._hooks_outside else "_compiled_call_impl"
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch_attribute(self._layer, slot, self))
            if self._in_checkpoint:
                stack.enter_context(checkpoint_wrapped(self._layer, self._checkpointed, Nesting.COMPILE))
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        eager = partial(type(layer).forward, layer) if self._hooks_outside else layer._call_impl
        if self._in_checkpoint and getattr(layer, "gradient_checkpointing", False) and layer.training:
            return eager(*args, **kwargs)  # inside of the checkpoint or before it: its function decides
        return self._run(None, lambda *hidden: eager(*hidden, *args[1:], **kwargs), args, kwargs)

    def _checkpointed(self, inner: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer compiled, inside of its checkpoint or with it."""
        keywords = layer_keywords(function) if isinstance(self._layer, GradientCheckpointingLayer) else {}
        if kwargs or not keywords:
            return inner(function, *args, **kwargs)
        checkpoint = stock_checkpoint(self._layer)
        return self._run(checkpoint, lambda *hidden: inner(function, *hidden, *args[1:]), args, keywords)

    def _run(self, checkpoint: Any, eager: LayerRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = None
        if self._kind.path != "eager" and not self._layers.is_hooked(self._layer):
            call = packed_call(self._layer, checkpoint, args, kwargs, hooks_outside=self._hooks_outside)
        return eager(*args[:1]) if call is None else self._kind.run(call, eager)
