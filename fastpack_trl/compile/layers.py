"""One compiled graph per kind of decoder layer: `torch.compile` of a layer is small, and its copies share it.

Where the compiled function is hooked in. `accelerate.utils.compile_regions` replaces each block by an
`OptimizedModule`, which renames the parameters of a saved state (``_orig_mod``); an instance attribute ``forward``
would travel with a pickled or copied model. Here each layer gets torch's own slot for this, ``_compiled_call_impl``
(what `nn.Module.compile` sets): its hooks stay, and torch drops it when a module is copied or pickled. In the slot lies
not the compiled layer but `_Call`, which hands everything but a packed training row to the layer as it is: evaluation,
`generate` and padded batches neither run compiled nor cause a recompile.

A checkpointed layer calls `_gradient_checkpointing_func` with its own forward, above `__call__` in older transformers
and below it in 5.23; so that function is wrapped as well. The checkpoint is compiled together with the layer (what is
computed again is then chosen per operator, and fused), unless it is not torch's plain one or saved-tensor hooks are
around it: offloading needs the checkpoint at run time, and what it runs is compiled instead.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from fastpack_trl.attention.model_features import attention_modules, text_model, window_of
from fastpack_trl.attention.per_document import PerDocumentLayer
from fastpack_trl.compile import recorded
from fastpack_trl.compile.trial import CANNOT_RUN, Run, median_times, step, undisturbed
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

logger = logging.getLogger(__name__)

# Metadata for other attentions: packed layers read `packed_layer`, and these lengths would recompile them per batch.
_UNREAD = frozenset(to_transformers_kwargs(PackedBatch.from_lengths((1,)))) - {"position_ids"}
# torch's plain checkpoint may be compiled; a further keyword could mean that somebody watches it at run time.
_PLAIN_CHECKPOINT = frozenset({"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check"})


class LayerKind:
    """Layers that share one compiled graph: same class, window and inner modules.

    Attributes:
        name: the class, e.g. ``LlamaDecoderLayer``.
        layers: how many.
        path: ``pending`` until the first packed row, then ``inductor`` (or the name of another backend) or ``eager``.
        reason: what was measured, or why it is eager.
        seconds: of the first forward and backward of each graph, compilation included; 0 before.
    """

    def __init__(self, layers: list[nn.Module], owner: CompiledLayers) -> None:
        self.name = type(layers[0]).__name__
        self.layers = len(layers)
        self.path = "pending"
        self.reason = ""
        self.seconds = 0.0
        self._owner = owner
        self._tried: set[str] = set()
        # A code object of its own each: torch counts graphs per code object, and stops at `recompile_limit`.
        compiled = partial(torch.compile, backend=owner.backend, dynamic=True, fullgraph=True)
        self._layer: Any = compiled(_own_code(_run_layer, self.name))
        self._with_checkpoint: Any = compiled(_own_code(_run_checkpointed, f"{self.name}_checkpointed"))

    def run(self, layer: Any, checkpoint: Any, stock: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One layer of this kind.

        Args:
            layer: the layer.
            checkpoint: its `_gradient_checkpointing_func`; None where it is not checkpointed.
            stock: the layer as it is; called with the hidden states.
            args, kwargs: of the layer.
        """
        if self.path == "eager" or not _is_packed_training(layer, args, kwargs):
            return stock(*args[:1])
        hidden = _with_gradient(layer, args[0])
        if hidden is None:
            return stock(args[0])
        kwargs = {name: value for name, value in kwargs.items() if name not in _UNREAD}
        rest, names = args[1:], recorded.asked_for()
        kwargs["packed_layer"] = _traceable(kwargs["packed_layer"], hidden)
        if kwargs["packed_layer"] is None or not recorded.KNOWN.issuperset(names):
            return stock(args[0])
        place = _place(checkpoint, names)
        if place not in self._tried:
            self._tried.add(place)
            self._decide(names, layer, checkpoint, stock, hidden, rest, kwargs)
            if self.path == "eager":
                return stock(args[0])
        try:
            output, records = self._compiled(names, layer, checkpoint, hidden, rest, kwargs)
        except self._owner.compile_errors as error:
            # Raised while a new shape or type was compiled, before anything ran.
            self._give_up(error)
            return stock(args[0])
        recorded.hand_over(records)
        return output

    def _compiled(
        self,
        names: tuple[str, ...],
        layer: Any,
        checkpoint: Any,
        hidden: Tensor,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, recorded.Recorded]:
        _mark_dynamic(hidden, kwargs)
        place = _place(checkpoint, names)
        forward = _forward_of(layer, checkpointed=place != "alone")
        if place == "outside":
            return self._with_checkpoint(names, checkpoint, forward, layer, hidden, rest, kwargs)
        run = partial(self._layer, names, forward, layer, rest=rest, kwargs=kwargs)
        return run(hidden) if place == "alone" else checkpoint(run, hidden)

    def _decide(
        self,
        names: tuple[str, ...],
        layer: Any,
        checkpoint: Any,
        stock: Run,
        hidden: Tensor,
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compile forward and backward on a copy of the layer's input, before anything depends on them."""
        if isinstance(checkpoint, partial) and checkpoint.keywords.get("use_reentrant", True):
            self._give_up("reentrant checkpointing: set gradient_checkpointing_kwargs={'use_reentrant': False}")
            return
        # An offloading checkpoint counts the layers that it sees: the trial takes torch's, and compiles what it runs.
        inside = _place(checkpoint, names) == "inside"
        trial = _NOT_COMPILED if inside else checkpoint
        eager: Run = partial(_eager_trial, layer, rest, kwargs) if inside else stock
        compiled: Run = lambda tensor: self._compiled(names, layer, trial, tensor, rest, kwargs)  # noqa: E731
        owner = self._owner
        owner.say(f"layer_compile: compiling {self.name} ...", end=" ")
        with undisturbed(hidden.device, _hooks_active()), recorded.nothing_recorded(), _floats_as_constants():
            try:
                self.seconds += step(compiled, hidden, layer)
            except CANNOT_RUN + owner.compile_errors as error:
                owner.say("failed")
                self._give_up(error)
                return
            except BaseException:
                owner.say("stopped")
                raise
            owner.say(f"{self.seconds:.1f} s")
            self.reason = f"{self.name} x {self.layers} compiled in {self.seconds:.1f} s"
            first = self.path == "pending"
            self.path = owner.backend if isinstance(owner.backend, str) else "compiled"
            if owner.measured and first:
                self._choose({"compiled": compiled, "eager": eager}, hidden, layer)
        owner.changed()

    def _choose(self, paths: dict[str, Run], hidden: Tensor, layer: nn.Module) -> None:
        times = median_times(paths, hidden, layer)
        seen = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in times.items())
        self.reason += f", {seen} per layer and row of {hidden.shape[1]:,} tokens"
        if min(times, key=times.__getitem__) == "eager":
            self.path = "eager"

    def _give_up(self, error: BaseException | str) -> None:
        self.path = "eager"
        said = error if isinstance(error, str) else f"{type(error).__name__}: {_first_line(error)}"
        self.reason = f"{self.name} x {self.layers} eager: {said}"
        logger.warning(f"layer_compile: {self.reason}")
        self._owner.changed()


class CompiledLayers:
    """What `compiled_layers` yields.

    Attributes:
        kinds: one `LayerKind` per kind of decoder layer.
        backend: of `torch.compile`.
        measured: whether a kind is timed against eager before it is taken.
    """

    def __init__(
        self,
        backend: str | Callable[..., Any],
        measured: bool,
        on_change: Callable[[CompiledLayers], None] | None,
        verbose: bool,
    ) -> None:
        import torch._dynamo.exc as exc  # takes a second to load: only where layers are compiled

        self.kinds: list[LayerKind] = []
        self.backend = backend
        self.measured = measured
        self._on_change = on_change
        self._verbose = verbose
        limit = getattr(exc, "FailOnRecompileLimitHit", exc.TorchDynamoException)
        self.compile_errors: tuple[type[Exception], ...] = (exc.TorchDynamoException, limit)

    @property
    def path(self) -> str:
        """The paths in use, e.g. ``inductor`` or ``eager, inductor``."""
        return ", ".join(sorted({kind.path for kind in self.kinds}))

    @property
    def reason(self) -> str:
        """What each kind does and why."""
        waiting = sorted({kind.name for kind in self.kinds if kind.path == "pending"})
        said = [kind.reason for kind in self.kinds if kind.reason]
        return "; ".join([*said, *(f"{name} is compiled at its first packed row" for name in waiting)])

    def changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self)

    def say(self, text: str, end: str = "\n") -> None:
        if self._verbose:
            print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def compiled_layers(
    model: nn.Module,
    *,
    measure: bool = False,
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
    `recompile_limit`) runs as it is, named once in the log and in `CompiledLayers.reason`.

    Args:
        model: a transformers causal language model, plain or inside PEFT; not sharded.
        measure: time a layer step (forward and backward) compiled and eager on the first packed row, and take the
            faster; costs a dozen layer steps.
        on_change: called with the yielded object whenever a kind was decided.
        verbose: print one line per compilation to stderr.

    Raises:
        ValueError: `model` has no decoder layers that call transformers' attention interface.
    """
    layers = decoder_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no decoder layers with packed attention: set layer_compile='off'")
    handle = CompiledLayers(_backend, measure, on_change, verbose)
    groups: dict[Any, list[nn.Module]] = {}
    for layer in layers:
        if layer._compiled_call_impl is None:  # else somebody compiled it already
            groups.setdefault(_structure(layer), []).append(layer)
    calls: list[_Call] = []
    for group in groups.values():
        kind = LayerKind(group, handle)
        handle.kinds.append(kind)
        calls += [_Call(layer, kind) for layer in group]
    try:
        for call in calls:
            call.install()
        yield handle
    finally:
        for call in calls:
            call.remove()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The members of the module lists that hold the attention modules of the text decoder."""
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
    """What a graph depends on beside shapes: the classes of the modules and the windows of the attentions."""
    windows = (window_of(module) for module in attention_modules_of(layer))
    return tuple(type(module) for module in layer.modules()), tuple(windows)


def attention_modules_of(layer: nn.Module) -> list[nn.Module]:
    """The modules of one layer that have a window to be asked for."""
    return [module for module in layer.modules() if hasattr(module, "config") and hasattr(module, "layer_idx")]


class _Call:
    """A layer's `_compiled_call_impl`."""

    def __init__(self, layer: Any, kind: LayerKind) -> None:
        self.layer = layer
        self.kind = kind

    def install(self) -> None:
        self.layer._compiled_call_impl = self
        self._watch_checkpoint()

    def remove(self) -> None:
        if self.layer.__dict__.get("_compiled_call_impl") is self:
            del self.layer._compiled_call_impl
        found = self.layer.__dict__.get("_gradient_checkpointing_func")
        while isinstance(found, _Checkpoint):
            found = self.layer._gradient_checkpointing_func = found.stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            # Inside of the checkpoint or before it: its function decides. It may have been set since, by `train()`.
            self._watch_checkpoint()
            return layer._call_impl(*args, **kwargs)
        return self.kind.run(layer, None, lambda *hidden: layer._call_impl(*hidden, *args[1:], **kwargs), args, kwargs)

    def _watch_checkpoint(self) -> None:
        found = self.layer.__dict__.get("_gradient_checkpointing_func")
        if found is not None and not isinstance(found, _Checkpoint):
            self.layer._gradient_checkpointing_func = _Checkpoint(found, self.layer, self.kind)


class _Checkpoint:
    """A layer's `_gradient_checkpointing_func`; a copy or a pickle of it is the function that it stands for."""

    def __init__(self, stock: Any, layer: nn.Module, kind: LayerKind) -> None:
        self.stock = stock
        self.layer = layer
        self.kind = kind

    def __call__(self, function: Any, *args: Any) -> Any:
        if not isinstance(function, partial) or not isinstance(self.layer, GradientCheckpointingLayer):
            return self.stock(function, *args)
        return self.kind.run(
            self.layer, self.stock, lambda *hidden: self.stock(function, *hidden, *args[1:]), args, function.keywords
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.stock, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.stock,)


def _itself(value: Any) -> Any:
    return value


def _not_compiled(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


_NOT_COMPILED = partial(_not_compiled)
"""torch's checkpoint as a function that is not compiled through: the place of an offloading one during a trial."""


def _eager_trial(layer: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> Any:
    return _not_compiled(partial(_forward_of(layer, checkpointed=True), layer, **kwargs), hidden, *rest)


def _run_layer(
    names: tuple[str, ...], forward: Any, layer: Any, hidden: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, recorded.Recorded]:
    return recorded.recording(names, partial(forward, layer, **kwargs), hidden, *rest)


def _run_checkpointed(
    names: tuple[str, ...],
    checkpoint: Any,
    forward: Any,
    layer: Any,
    hidden: Tensor,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, recorded.Recorded]:
    return recorded.recording(names, checkpoint, partial(forward, layer, **kwargs), hidden, *rest)


def _call_impl(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _forward_of(layer: Any, *, checkpointed: bool) -> Callable[..., Any]:
    """What runs inside of the checkpoint, or the whole call of a layer without one."""
    if checkpointed and "__call__" not in GradientCheckpointingLayer.__dict__:
        # The forward of the class is the checkpoint here, and its own code lies beneath; hooks run outside.
        forward: Callable[..., Any] = type(layer).forward.__wrapped__
        return forward
    return _call_impl


def _own_code(function: Any, name: str) -> Any:
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _is_packed_training(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        kwargs.get("packed_layer") is not None
        and layer.training
        and torch.is_grad_enabled()
        and bool(args)
        and isinstance(args[0], Tensor)
        # Sizes 0 and 1 are compiled as constants: a graph of their own for a row of one token.
        and args[0].dim() == 3
        and args[0].shape[1] > 1
    )


def _traceable(packed_layer: Any, hidden: Tensor) -> Any:
    """The row's metadata for a graph; None where attention is one kernel per document, which no graph can hold."""
    if isinstance(packed_layer, PerDocumentLayer) and hidden.device.type != "cpu":
        return packed_layer.compiled
    return packed_layer


def _with_gradient(layer: nn.Module, hidden: Tensor) -> Tensor | None:
    """The input with a gradient, so that the first layer over frozen embeddings does not need its own graph.

    None where nothing of the layer is trained and nothing before it: it has no backward to compile for.
    """
    if hidden.requires_grad:
        return hidden
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return hidden.detach().requires_grad_()
    return None


def _mark_dynamic(hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Tell the compiler which sizes change from row to row.

    ``dynamic=True`` alone gives sizes that are equal in the first row one symbol: 2,048 tokens of width 2,048 would be
    compiled as that constant. A marked size has its own.
    """
    # The same dimensions in every row, whatever their sizes: they are part of the guards.
    tokens = hidden.shape[1]
    torch._dynamo.maybe_mark_dynamic(hidden, 1)
    for tensor in _tensors(kwargs):
        if not hasattr(tensor, "_dynamo_weak_dynamic_indices") and tensor.dim() > 1 and tensor.shape[1] == tokens:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for tensor in _tensors(kwargs["packed_layer"]):
        if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):  # shared by the layers: marked once
            for dim, length in enumerate(tensor.shape):
                if length > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name != "packed_layer":
                yield from _tensors(item)


def _place(checkpoint: Any, names: tuple[str, ...]) -> str:
    """Where the compiled function is: ``alone`` (no checkpoint), ``outside`` of the checkpoint, or ``inside``.

    Nothing may be recorded in a checkpoint that is compiled: its function has no side effects there.
    """
    if checkpoint is None:
        return "alone"
    return "outside" if _is_plain(checkpoint) and not names and not _hooks_active() else "inside"


def _floats_as_constants() -> contextlib.AbstractContextManager[Any]:
    """``dynamic=True`` would first make symbols of scales and epsilons, give up, and trace the layer again."""
    import torch._dynamo.config as config

    if not hasattr(config, "specialize_float"):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[Any] = config.patch(specialize_float=True)
    return patch


def _is_plain(checkpoint: Any) -> bool:
    return (
        isinstance(checkpoint, partial)
        and checkpoint.func is torch_checkpoint
        and not checkpoint.args
        and checkpoint.keywords.get("use_reentrant") is False
        and checkpoint.keywords.keys() <= _PLAIN_CHECKPOINT
    )


def _hooks_active() -> bool:
    """Whether saved-tensor hooks are around this call: a checkpoint compiled beneath them would run eager."""
    read = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return read is not None and read(True) is not None


def _first_line(error: BaseException) -> str:
    """What an error says; the compiler's put the cause below a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]
