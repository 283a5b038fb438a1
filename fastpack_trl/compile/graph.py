"""The compiled function of a layer: inside or outside of the checkpoint, with sizes that change per row left open.

transformers' hooks record outputs inside of a layer (router logits): a hook appends to a list that it finds through a
context variable, which torch cannot trace. transformers' own variable becomes a plain attribute while something is
compiled; here it holds a dictionary of this one layer, and what was recorded leaves the compiled function as outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastpack_trl.model.checkpoint_seam import checkpoints_inside_hooks
from fastpack_trl.model.upstream import resolve
from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

# Metadata for other attentions: packed layers read `packed_layer`, and these lengths would recompile them per batch.
_UNREAD = frozenset(to_transformers_kwargs(PackedBatch.from_lengths((1,)))) - {"position_ids"}
# torch's plain checkpoint may be compiled; a further keyword could mean that other code observes it at run time.
_PLAIN_CHECKPOINT = frozenset({"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check"})
# None: recorded in another way; such a layer is compiled if torch can trace it.
_recorder: Any = resolve("transformers.utils.output_capturing._active_collector")
# Recorded inside of a layer; layers and attentions themselves are recorded around the compiled function.
_RECORDED = frozenset({"router_logits"})

Recorded = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer with a packed training row.

    Attributes:
        layer: the layer.
        checkpoint: its `_gradient_checkpointing_func`; None if it is not checkpointed.
        given: the hidden states that the layer was called with, (1, total_tokens, hidden_size).
        hidden: the same with a gradient.
        rest: positional arguments after the hidden states.
        kwargs: keywords that the layer reads.
        names: outputs to be recorded inside of the layer.
        hooks_outside: the hooks of the layer have run already: FSDP 2 has gathered its parameters.
    """

    layer: Any
    checkpoint: Any
    given: Tensor
    hidden: Tensor
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    hooks_outside: bool = False

    @property
    def place(self) -> str:
        """Return where the compiled function is: ``alone`` (no checkpoint), ``outside`` of it or ``inside``.

        Nothing may be recorded in a checkpoint that is compiled: its function has no side effects there.
        """
        if self.checkpoint is None:
            return "alone"
        return "outside" if is_plain(self.checkpoint) and not self.names and not hooks_active() else "inside"

    def for_trial(self) -> LayerCall:
        """Return the call for a trial, under torch's checkpoint: an offloading one counts the layers that it sees."""
        return replace(self, checkpoint=_plain_checkpoint) if self.place == "inside" else self


class CompiledLayer:
    """The two compiled functions for the layers of one kind: with their checkpoint and without.

    Args:
        name: of the code objects, seen in torch's logs.
        backend: of `torch.compile`.
    """

    def __init__(self, name: str, backend: str | Callable[..., Any]) -> None:
        # Inductor's padding of products asks for the number of tokens before it finds that every width is aligned: a
        # graph for rows of less than 65, 128 and 257 tokens each.
        options = {"shape_padding": False} if backend == "inductor" else None
        compiled = partial(torch.compile, backend=backend, dynamic=True, fullgraph=True, options=options)
        self._layer, self._with_checkpoint = (
            _in_one_state(compiled(_separate_code(_run, each))) for each in (name, f"{name}_checkpointed")
        )
        self._traced: set[str] = set()

    def __call__(self, call: LayerCall, hidden: Tensor) -> tuple[Any, Recorded]:
        """Run `call` with other hidden states; return the layer's output and its recorded outputs."""
        _mark_dynamic(hidden, call.kwargs)
        if call.place not in self._traced:
            self._traced.add(call.place)
            _mark_constant(call, hidden)
        place = call.place
        forward = _forward_of(call, checkpointed=place != "alone")
        function, checkpoint = (self._with_checkpoint, call.checkpoint) if place == "outside" else (self._layer, None)
        run = partial(function, call.names, checkpoint, forward, call.layer, rest=call.rest, kwargs=call.kwargs)
        return call.checkpoint(run, hidden) if place == "inside" else run(hidden)


def packed_call(
    layer: Any, checkpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooks_outside: bool = False
) -> LayerCall | None:
    """Return the call of a layer as one that may be compiled; None if the layer must run as it is.

    It must without a packed row, in evaluation, without gradients, if attention is one kernel per document (which no
    graph can hold), or if anything but router logits is recorded inside.
    """
    packed, hidden = kwargs.get("packed_layer"), args[0] if args else None
    if packed is None or not layer.training or not torch.is_grad_enabled():
        return None
    # Sizes 0 and 1 are compiled as constants: a graph of their own for a row of one token, or of one chunk.
    one_chunk = any(isinstance(value, Chunks) and value.causal.shape[0] < 2 for value in kwargs.values())
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[1] < 2 or one_chunk:
        return None
    names = tuple((_recorder.get() if _recorder is not None else None) or ())
    if getattr(packed, "calls_per_document", False) or not _RECORDED.issuperset(names):
        return None
    given = hidden
    if not hidden.requires_grad:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            return None  # neither it nor any layer before it trains, so there is no backward to compile for
        # The first layer over frozen embeddings would need a graph of its own otherwise.
        hidden = hidden.detach().requires_grad_()
    read = {name: value for name, value in kwargs.items() if name not in _UNREAD}
    return LayerCall(layer, checkpoint, given, hidden, args[1:], read, names, hooks_outside)


def hand_over(recorded: Recorded) -> None:
    """Append the recorded outputs of a compiled layer to those of the model."""
    for name, values in recorded.items():
        _recorder.get()[name].extend(values)


@contextlib.contextmanager
def nothing_recorded() -> Iterator[None]:
    """Keep outputs of layers that run in this context out of the model's output."""
    token = _recorder.set(None) if _recorder is not None else None
    try:
        yield
    finally:
        if token is not None:
            _recorder.reset(token)


def is_plain(checkpoint: Any) -> bool:
    """Return whether it is torch's non-reentrant checkpoint, which can be compiled together with its function."""
    return (
        isinstance(checkpoint, partial)
        and checkpoint.func is torch_checkpoint
        and not checkpoint.args
        and checkpoint.keywords.get("use_reentrant") is False
        and checkpoint.keywords.keys() <= _PLAIN_CHECKPOINT
    )


def hooks_active() -> bool:
    """Return whether saved-tensor hooks are around this call: a checkpoint compiled beneath them would run eager."""
    read = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return read is not None and read(True) is not None


def _in_one_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a compiled function under fixed global settings: torch guards on them, another value makes a second graph.

    Floats are constants of the graph: ``dynamic=True`` would first make symbols of them, give up, and trace again.
    Autocast's cache of weights is off, as during capture; compiled code never uses it. Set around every call, since any
    row may need a second graph, and around nothing else: functions that a user compiles may have floats that change. In
    torch 2.13 the first setting is one of the thread, and a recompute may be in another.
    """
    import torch._dynamo.config as config

    has_floats = hasattr(config, "specialize_float")

    def call(*args: Any, **kwargs: Any) -> Any:
        before, caches = has_floats and config.specialize_float, torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            if has_floats:
                config.specialize_float = True
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)
            if has_floats:
                config.specialize_float = before

    return call


def _run(
    names: tuple[str, ...],
    checkpoint: Any,
    forward: Any,
    layer: Any,
    hidden: Tensor,
    rest: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Recorded]:
    """Return the output of the layer, and its recorded outputs."""
    run = partial(forward, layer, **kwargs)
    if checkpoint is not None:
        run = partial(checkpoint, run)
    recorded: Recorded = {name: [] for name in names}
    if _recorder is None:
        return run(hidden, *rest), recorded
    token = _recorder.set(recorded)  # only in graphs: elsewhere other threads would see the dictionary
    out = run(hidden, *rest)
    _recorder.reset(token)
    return out, recorded


def _plain_checkpoint(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


def _call_impl(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer._call_impl(*args, **kwargs)


def _forward_of(call: LayerCall, *, checkpointed: bool) -> Callable[..., Any]:
    """Return what runs inside of the checkpoint; without a checkpoint, the whole call of the layer."""
    forward: Callable[..., Any] = type(call.layer).forward
    if checkpointed and checkpoints_inside_hooks():
        # The forward of the class is the checkpoint here, and its own code lies beneath.
        return cast("Callable[..., Any]", forward.__wrapped__)  # type: ignore[attr-defined]
    return forward if call.hooks_outside else _call_impl


def _separate_code(function: Any, name: str) -> Any:
    # torch counts graphs per code object and stops at `recompile_limit`: every kind of layer has its own.
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _mark_dynamic(hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Tell the compiler which sizes change from row to row.

    ``dynamic=True`` alone gives sizes that are equal in the first row one symbol: 2,048 tokens of width 2,048 would be
    compiled as that constant. A marked size has its own.
    """
    # The same dimensions in every row, whatever their sizes: they are part of the guards.
    tokens = hidden.shape[1]
    torch._dynamo.maybe_mark_dynamic(hidden, 1)
    for name, value in kwargs.items():
        for tensor in tensors_in(value):
            if hasattr(tensor, "_dynamo_weak_dynamic_indices"):
                continue  # shared by the layers: marked once
            for dim, length in enumerate(tensor.shape):
                if isinstance(value, Chunks):
                    changes = dim == 0 or tensor is value.chain
                else:
                    changes = name == "packed_layer" or (dim == 1 and length == tokens)
                if changes and length > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _mark_constant(call: LayerCall, hidden: Tensor) -> None:
    """Tell the compiler which sizes are those of the model, before it traces a call.

    It would make symbols of them, then find each to be a constant at its first use with a parameter: of adapters that
    were cast for the model (`apply_lora`), the rank stays a symbol to the end, and every shape is a formula in it.
    """
    mark = torch._dynamo.mark_static
    for dim in (0, 2):
        mark(hidden, dim)
    for name, value in call.kwargs.items():
        for tensor in tensors_in(value) if name != "packed_layer" else ():
            for dim in range(tensor.ndim):
                if dim not in getattr(tensor, "_dynamo_weak_dynamic_indices", ()):
                    mark(tensor, dim)
    for module in call.layer.modules():
        cast = getattr(module, "fastpack_cast", None)
        if cast is not None:
            mark(cast.a)
            mark(cast.b)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
