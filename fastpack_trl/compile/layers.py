"""One compiled graph per kind of decoder layer: `torch.compile` of a layer is small, and its copies share it.

Where the compiled function is hooked in. `accelerate.utils.compile_regions` replaces each block by an
`OptimizedModule`, which renames the parameters of a saved state (``_orig_mod``); an instance attribute ``forward``
would travel with a pickled or copied model. Here each layer gets torch's own slot for this, ``_compiled_call_impl``
(what `nn.Module.compile` sets): its hooks stay, and torch drops it when a module is copied or pickled. In the slot lies
not the compiled layer but `_Call`, which hands everything but a packed training row to the layer as it is: evaluation,
`generate` and padded batches neither run compiled nor cause a recompile.

A checkpointed layer calls its checkpoint function with its own forward, above `__call__` in older transformers and
below it in 5.23; so that function is wrapped as well (`model.checkpoint_seam`). The checkpoint is compiled together
with the layer (what is computed again is then chosen per operator, and fused), unless it is not torch's plain one or
saved-tensor hooks are around it: offloading needs the checkpoint at run time, and what it runs is compiled instead.

Under FSDP 2 the hooks of a layer gather its parameters before it runs and part them again afterwards. They stay outside
of the compiled function: there the layer gets a ``forward`` of its own (`_CallInHooks`), in the slot's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from fastpack_trl.compile.hooked import HookedLayers
from fastpack_trl.compile.kind import LayerKind, Settings
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.model.checkpoint_seam import (
    Nesting,
    checkpoint_wrapped,
    checkpoints_inside_hooks,
    layer_keywords,
    stock_checkpoint,
)
from fastpack_trl.model.facts import attention_modules, text_model, window_of
from fastpack_trl.model.patches import attribute_set
from fastpack_trl.model.ranks import Ranks
from fastpack_trl.model.upstream import GradientCheckpointingLayer


class CompiledLayers:
    """The compiled layers of one model, as `compiled_layers` yields them.

    Attributes:
        kinds: one `LayerKind` per kind of decoder layer, with its path, its reason and the seconds of compilation.
        hooked: layers that run as they are for a hook of the user.
        waits: what has to pass before any kind is decided, as `reason` says it.
    """

    def __init__(self) -> None:
        self.kinds: list[LayerKind] = []
        self.waits = ""
        self.hooked = HookedLayers({}, lambda: None)

    @property
    def path(self) -> str:
        """Return the paths in use, e.g. ``inductor`` or ``eager, inductor``."""
        paths = {kind.path for kind in self.kinds if kind.path == "eager" or not all(self.hooked.on(kind.members))}
        return ", ".join(sorted(paths | ({"eager"} if self._hooked() else set())))

    @property
    def unpaid(self) -> bool:
        """Return whether nothing is compiled because too few steps are left."""
        return bool(self.kinds) and all(kind.unpaid for kind in self.kinds)

    @property
    def seconds(self) -> float:
        """Return the host time of all that was compiled and measured."""
        return sum(kind.deciding for kind in self.kinds)

    @property
    def reason(self) -> str:
        """Return what each kind does and why."""
        waiting = sorted({kind.name for kind in self.kinds if kind.path == "pending"})
        said = [kind.reason for kind in self.kinds if kind.reason]
        found = self._hooked()
        if found:
            layers = "1 layer runs" if len(found) == 1 else f"{len(found)} layers run"
            said.append(f"{layers} eager for {found[0]}: remove it to have them compiled")
        return "; ".join([*said, *(f"{name} is compiled at its first packed row{self.waits}" for name in waiting)])

    def agree(self, ranks: Ranks) -> None:
        """Go on with what is weighed together; see `LayerKind.agree`."""
        for kind in self.kinds:
            if kind.weighing is not None and not kind.weighing.agreed:
                kind.agree(ranks)

    def _hooked(self) -> list[str]:
        """Return the hook of each layer that would be compiled without it."""
        layers = [layer for kind in self.kinds if kind.path != "eager" for layer in kind.members]
        return list(filter(None, self.hooked.on(layers)))


@contextlib.contextmanager
def compiled_layers(
    model: nn.Module,
    *,
    measure: bool = False,
    left: Callable[[], StepsLeft] | None = None,
    early: Callable[[], bool] | None = None,
    together: bool = False,
    hooks_outside: bool = False,
    on_change: Callable[[CompiledLayers], None] | None = None,
    verbose: bool = True,
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
        measure: time a layer step (forward and backward) on the first packed row, compiled and eager; take the faster.
            Costs some fifteen layer steps.
        left: returns what is left of the run: layers are then compiled only where it
            can be paid back (`measure.payback`), by an eager layer step that is timed before. None: whatever is left.
        early: returns whether it is too early to decide: the layers run as they are. None: it never is.
        together: several processes weigh together: `CompiledLayers.agree` is called between steps, by each of them.
        hooks_outside: compile the layers' own forwards, beneath their hooks. For FSDP 2, whose hooks gather the
            parameters of a layer before it runs; the model may be sharded meanwhile.
        on_change: called with the yielded object whenever a kind was decided.
        verbose: print one line per compilation to stderr.

    Raises:
        ValueError: `model` has no decoder layers that call transformers' attention interface.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers with packed attention: set layer_compile='off'")
    handle = CompiledLayers()
    changed = (lambda: None) if on_change is None else partial(on_change, handle)
    names = {module: name for name, module in model.named_modules()}
    handle.hooked = HookedLayers({layer: names[layer] for layer in layers}, changed)
    settings = Settings(
        _backend, measure, changed, verbose, handle.hooked, left, early or (lambda: False),
        together, hooks_outside,
    )  # fmt: skip
    handle.waits = ", after the first step" if early is not None else ""
    groups: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        if layer._compiled_call_impl is None:  # else somebody compiled it already
            groups.setdefault(_structure(layer), []).append(layer)
    calls: list[_Call] = []
    for group in groups.values():
        kind = LayerKind(group, settings)
        handle.kinds.append(kind)
        calls += [(_CallInHooks if hooks_outside else _Call)(layer, kind) for layer in group]
    with contextlib.ExitStack() as stack:
        for call in calls:
            stack.enter_context(call.installed())
        yield handle


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of module lists that hold the attention modules of the text decoder."""
    base = text_model(model)
    attentions = {id(module) for module in attention_modules(base)}
    found: dict[int, nn.Module] = {}
    for stack in base.modules():
        for layer in stack if isinstance(stack, nn.ModuleList) else ():
            if any(id(module) in attentions for module in layer.modules()):
                found.setdefault(id(layer), layer)
    inner = {id(module) for layer in found.values() for module in layer.modules() if module is not layer}
    return [layer for key, layer in found.items() if key not in inner]


def _structure(layer: nn.Module) -> Any:
    """Return what a graph depends on beside shapes: the classes of the modules and the windows of the attentions."""
    windows = (window_of(module) for module in attention_modules_of(layer))
    return tuple(type(module) for module in layer.modules()), tuple(windows)


def attention_modules_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of one layer that have a window to be asked for."""
    return [module for module in layer.modules() if hasattr(module, "config") and hasattr(module, "layer_idx")]


class _Call:
    """A layer's `_compiled_call_impl`, and its checkpoint function while it is checkpointed."""

    def __init__(self, layer: Any, kind: LayerKind) -> None:
        self.layer = layer
        self.kind = kind

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        in_checkpoint = checkpoint_wrapped(self.layer, self.checkpointed, Nesting.COMPILE)
        with attribute_set(self.layer, "_compiled_call_impl", self), in_checkpoint:
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.layer._call_impl, args, kwargs)

    def _run(self, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layer
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            return stock(*args, **kwargs)  # inside of the checkpoint or before it: its function decides
        return self.kind.run(layer, None, lambda *hidden: stock(*hidden, *args[1:], **kwargs), args, kwargs)

    def checkpointed(self, inner: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the layer compiled, inside of its checkpoint or with it."""
        keywords = layer_keywords(function) if isinstance(self.layer, GradientCheckpointingLayer) else {}
        if kwargs or not keywords:
            return inner(function, *args, **kwargs)
        stock = stock_checkpoint(self.layer)
        return self.kind.run(self.layer, stock, lambda *hidden: inner(function, *hidden, *args[1:]), args, keywords)


class _CallInHooks(_Call):
    """A layer's own ``forward``, which torch calls between the hooks; no copy travels with it: FSDP allows none.

    Its class is looked up in each call: FSDP gives the layer another one meanwhile.
    """

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(attribute_set(self.layer, "forward", self))
            if checkpoints_inside_hooks():  # else a checkpoint runs what is here
                stack.enter_context(checkpoint_wrapped(self.layer, self.checkpointed, Nesting.COMPILE))
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock = partial(type(self.layer).forward, self.layer)
        if checkpoints_inside_hooks():
            return self._run(stock, args, kwargs)
        return self.kind.run(self.layer, None, lambda *hidden: stock(*hidden, *args[1:], **kwargs), args, kwargs)
