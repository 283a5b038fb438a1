"""Decoder layers of one kind: compiled at their first packed row if that pays back over the remaining steps."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.compile.graph import (
    CompiledLayer,
    LayerCall,
    Recorded,
    hand_over,
    hooks_active,
    nothing_recorded,
    run_eagerly,
    tensors_in,
)
from fastpack_trl.errors import close_frames, first_cause
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.payback import StartUpCost, StepsLeft
from fastpack_trl.measure.timing import clock_of, timed
from fastpack_trl.model.changes import restore_buffers
from fastpack_trl.model.checkpoint_seam import is_reentrant
from fastpack_trl.model.hooks import HookWatch

logger = logging.getLogger(__name__)

LayerRun = Callable[..., Any]
"""Maps hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

COMPILE_SECONDS = 8.0
"""Seconds to compile one kind of layer: 7 to 9 on an H200 for dense layers, 10 and 6 for those of gpt-oss."""
SAVED = 0.3
"""Share of an eager layer step that compiling saves: 0.2 to 0.42 there. In 71 comparisons it was never slower."""


class CompiledLayers:
    """The compiled layers of one model, as `compiled_layers` yields them; its arguments are documented there.

    A layer with a user's hook runs eagerly while the hook is there: torch would bake the hooks of the first layer into
    the graph that all layers of a kind share, and its guards ignore hooks that are added later.

    Attributes:
        kinds: one `LayerKind` per kind of decoder layer.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        backend: str | Callable[..., Any],
        left: Callable[[], StepsLeft | None] | None,
        on_change: Callable[[CompiledLayers], None] | None,
        verbose: bool,
    ) -> None:
        self.kinds: list[LayerKind] = []
        self.backend, self.left, self.verbose = backend, left, verbose
        self._watches = {layer: HookWatch(layer, name) for layer, name in names.items()}
        self._on_change = on_change
        self._warned: set[str] = set()

    def changed(self) -> None:
        """Report that a kind was decided, or that a layer got its first hook or lost its last."""
        if self._on_change is not None:
            self._on_change(self)

    def is_hooked(self, layer: nn.Module) -> bool:
        """Return whether a user's hook reaches into a layer; checked before each call of it."""
        watch = self._watches[layer]
        before, hook = watch.found, watch.look()
        if hook != before:
            what = hook.partition(" on ")[0]
            if what and what not in self._warned:
                self._warned.add(what)
                logger.warning(
                    f"layer_compile: {hook}: layers that it reaches run eager while it is there; remove it to have "
                    "them compiled, or set layer_compile='off'"
                )
            self.changed()
        return bool(hook)

    @property
    def path(self) -> str:
        """Return the paths in use, e.g. ``inductor`` or ``eager, inductor``."""
        paths = {"eager" if self._watches[layer].found else kind.path for kind in self.kinds for layer in kind.members}
        return ", ".join(sorted(paths))

    @property
    def unpaid(self) -> bool:
        """Return whether nothing is compiled because too few steps are left."""
        return bool(self.kinds) and all(kind.unpaid for kind in self.kinds)

    @property
    def reason(self) -> str:
        """Return what each kind does and why."""
        reasons = [kind.reason for kind in self.kinds if kind.reason]
        compiled = (layer for kind in self.kinds if kind.path != "eager" for layer in kind.members)
        hooks = [hook for layer in compiled if (hook := self._watches[layer].found)]
        if hooks:
            layers = "1 layer runs" if len(hooks) == 1 else f"{len(hooks)} layers run"
            reasons.append(f"{layers} eager for {hooks[0]}: remove it to have them compiled")
        later = ", after the first step" if self.left is not None else ""
        pending = sorted({kind.name for kind in self.kinds if kind.path == "pending"})
        return "; ".join([*reasons, *(f"{name} is compiled at its first packed row{later}" for name in pending)])


class LayerKind:
    """Layers that share one compiled graph: same class, window and inner modules.

    Attributes:
        name: the class, e.g. ``LlamaDecoderLayer``.
        members: the layers.
        path: ``pending`` until the first packed row, then ``inductor`` (or the name of another backend) or ``eager``.
        reason: how long compiling took, or why the layers are not compiled.
        seconds: of the first forward and backward of each graph, compilation included; 0 before.
        unpaid: not compiled because too few steps are left.
    """

    def __init__(self, layers: list[nn.Module], handle: CompiledLayers) -> None:
        import torch._dynamo.exc as exc  # takes a second to load: only where layers are compiled

        self.name = type(layers[0]).__name__
        self.members = layers
        self.path = "pending"
        self.reason = ""
        self.seconds = 0.0
        self.unpaid = False
        self._handle = handle
        self._tried: set[str] = set()
        self._graph: CompiledLayer | None = None
        self._compile_errors = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit, OSError)

    def run(self, call: LayerCall, eager: LayerRun) -> Any:
        """Run one layer of this kind; `eager` runs it uncompiled on given hidden states."""
        place = call.place
        if place not in self._tried:
            left = self._handle.left and self._handle.left()
            if self._handle.left is not None and left is None:  # too early
                return eager(call.given)
            self._tried.add(place)
            self._decide(call, left)
            if self.path == "eager":
                return eager(call.given)
        try:
            output, records = self._compiled(call, call.hidden)
        except self._compile_errors as error:
            # Raised while a new shape or type was compiled, before anything ran.
            close_frames(error)
            self._give_up(error)
            return eager(call.given)
        hand_over(records)
        return output

    def _compiled(self, call: LayerCall, hidden: Tensor) -> tuple[Any, Recorded]:
        if self._graph is None:  # only now: `torch.compile` itself fails where Inductor's cache cannot be written
            self._graph = CompiledLayer(self.name, self._handle.backend)
        return self._graph(call, hidden)

    def _decide(self, call: LayerCall, left: StepsLeft | None) -> None:
        """Compile forward and backward on a copy of the layer's input, before anything depends on them."""
        if is_reentrant(call.checkpoint):
            self._give_up("reentrant checkpointing: set gradient_checkpointing_kwargs={'use_reentrant': False}")
            return
        with _isolated(call):
            trial = call.for_trial()
            if self.path != "pending" or left is None or self._pays(trial, left):
                self._compile(trial)
        self._handle.changed()

    def _pays(self, call: LayerCall, left: StepsLeft) -> bool:
        """Return whether the remaining steps pay for compiling, by one timed eager layer step."""
        try:
            seconds = [_timed_step(run_eagerly, call) for _ in range(2)][-1]
        except FAILURES as error:  # the compiled step will tell
            close_frames(error)
            return True
        cost = StartUpCost(COMPILE_SECONDS, SAVED * seconds * len(self.members) * left.rows)
        if cost.pays(left.steps):
            return True
        self.path, self.unpaid = "eager", True
        self.reason = (
            f"{self.name} x {len(self.members)} not compiled: {left.steps:,} steps left, {COMPILE_SECONDS:.0f} s would "
            f"pay from {math.ceil(cost.steps):,} on; eager {1000 * seconds:.2f} ms per layer and row of "
            f"{call.hidden.shape[1]:,} tokens"
        )
        return False

    def _compile(self, call: LayerCall) -> None:
        handle = self._handle
        if handle.verbose:  # it takes seconds
            print(f"layer_compile: compiling {self.name} ...", file=sys.stderr, flush=True)
        try:
            seconds = _timed_step(self._compiled, call)
        except FAILURES + self._compile_errors as error:
            close_frames(error)
            self._give_up(error)
            return
        self.seconds += seconds
        self.path = handle.backend if isinstance(handle.backend, str) else "compiled"
        self.reason = f"{self.name} x {len(self.members)} compiled in {self.seconds:.1f} s"

    def _give_up(self, error: BaseException | str) -> None:
        self.path = "eager"
        why = error if isinstance(error, str) else f"{type(error).__name__}: {_first_lines(error)}"
        self.reason = f"{self.name} x {len(self.members)} not compiled: {why}"
        logger.warning(f"layer_compile: {self.reason}; layer_compile='off' spares the attempt")
        self._handle.changed()


def _first_lines(error: BaseException) -> str:
    """Return the cause of an error; the compiler's errors have it below a heading and a command."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines[1:] if "rror" in line and "TORCHDYNAMO" not in line]
    told = " ".join([*lines[:1], *(causes or [line for line in lines[1:2] if "TORCHDYNAMO" not in line])[:1]])[:300]
    if isinstance(first_cause(error), OSError) or "[Errno" in told:
        told += "; set TORCHINDUCTOR_CACHE_DIR to a folder with room that can be written"
    return told


@contextmanager
def _isolated(call: LayerCall) -> Iterator[None]:
    """Restore random state and buffers afterwards; nothing is recorded, no saved-tensor hook sees a tensor."""
    device = call.hidden.device
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(restore_buffers(call.layer))
        stack.enter_context(nothing_recorded())
        if hooks_active():
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


def _timed_step(run: Callable[[LayerCall, Tensor], Any], call: LayerCall) -> float:
    """Return the seconds of forward and backward.

    The gradients go to nobody: no ``.grad``, no hook of a reducer or of the user.
    """

    def differentiate() -> None:
        hidden = call.hidden.detach().requires_grad_()
        roots = [tensor for tensor in tensors_in(run(call, hidden)) if tensor.requires_grad]
        ones = [torch.ones_like(tensor) for tensor in roots]
        torch.autograd.grad(roots, [hidden, *_trained(call.layer)], ones, allow_unused=True)

    return timed(differentiate, clock_of(call.hidden.device.type, call.hidden.device))[1]


def _trained(layer: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a step trains, as the layer reads them.

    Where adapters were cast together for the whole model (`apply_lora`) those casts stand for them: a gradient of the
    parameters would go through a graph that is not this layer's, and the run still needs it.
    """
    casts = [cast for module in layer.modules() if (cast := getattr(module, "fastpack_cast", None)) is not None]
    made = {id(parameter) for cast in casts for parameter in cast.made_from[:2]}
    for cast in casts:
        yield from (tensor for tensor in (cast.a, cast.b) if tensor.requires_grad)
    # A hook on a parameter would see each gradient that is requested.
    parameters = (p for p in layer.parameters() if p.requires_grad and not p._backward_hooks)
    yield from (p for p in parameters if id(p) not in made)
