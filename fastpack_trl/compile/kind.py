"""Decoder layers of one kind: compiled at their first packed row if that pays back over the remaining steps."""

from __future__ import annotations

import logging
import math
import time
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
    tensors_in,
)
from fastpack_trl.errors import close_frames, first_cause
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.payback import StartUpCost, StepsLeft
from fastpack_trl.model.changes import restore_buffers
from fastpack_trl.model.checkpoint_seam import is_reentrant
from fastpack_trl.model.hooks import HookWatch

logger = logging.getLogger(__name__)

LayerRun = Callable[..., Any]
"""Maps hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

COMPILE_SECONDS = 12.0
"""Seconds to compile one kind of layer with cold caches: 11 to 19 on an H100, 14 in the median; 3 with warm ones."""
SAVED = 0.3
"""Share of an eager layer step that compiling saves: 0.2 to 0.42 on an H200. In 71 comparisons it was never slower."""
LAUNCH_SECONDS, FLOPS_PER_SECOND = 3e-3, 5e14
"""Seconds that the host takes to launch the forward and backward pass of a layer, and the rate at which an H200 runs
its matmuls if these take longer: an eager step is assumed to take the larger of the two."""


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
    ) -> None:
        self.kinds: list[LayerKind] = []
        self.backend, self.left, self._has_warned = backend, left, False
        self._watches = {layer: HookWatch(layer, name) for layer, name in names.items()}
        self._on_change = on_change

    def changed(self) -> None:
        """Report that a kind was decided, or that a layer got its first hook or lost its last."""
        if self._on_change is not None:
            self._on_change(self)

    def is_hooked(self, layer: nn.Module) -> bool:
        """Return whether a user's hook reaches into a layer; checked before each call of it."""
        watch = self._watches[layer]
        before, hook = watch.found, watch.look()
        if hook != before:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(f"layer_compile: {self._hooked}, or set layer_compile='off'")
            self.changed()
        return bool(hook)

    @property
    def _hooked(self) -> str:
        """Return what the first hook of the user that is on a layer or inside one does; empty if there is none."""
        hook = next((watch.found for watch in self._watches.values() if watch.found), "")
        return hook and f"{hook}: layers that it reaches run eager; remove it to have them compiled"

    @property
    def path(self) -> str:
        """Return the paths in use, e.g. ``inductor`` or ``eager, inductor``."""
        return ", ".join(sorted({kind.path for kind in self.kinds} | ({"eager"} if self._hooked else set())))

    @property
    def unpaid(self) -> bool:
        """Return whether nothing is compiled because too few steps are left."""
        return bool(self.kinds) and all(kind.unpaid for kind in self.kinds)

    @property
    def reason(self) -> str:
        """Return what each kind does and why."""
        reasons = [text for text in (*(kind.reason for kind in self.kinds), self._hooked) if text]
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
        seconds: time to compile it.
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
        if self.path == "pending" and left is not None and not self._pays(call, left):
            self.path, self.unpaid = "eager", True
        else:
            self._compile(call.for_trial())
        self._handle.changed()

    def _pays(self, call: LayerCall, left: StepsLeft) -> bool:
        """Return whether the remaining steps pay for compiling."""
        weights = sum(_values(weight) for name, weight in call.layer.named_parameters() if _is_dense(name, weight))
        seconds = max(LAUNCH_SECONDS, 6 * weights * call.hidden.shape[1] / FLOPS_PER_SECOND)
        cost = StartUpCost(COMPILE_SECONDS, SAVED * seconds * len(self.members) * left.rows)
        self.reason = (
            f"{self.name} x {len(self.members)} not compiled: {left.steps:,} steps left, it pays off from "
            f"{math.ceil(cost.steps):,} on"
        )
        return cost.pays(left.steps)

    def _compile(self, call: LayerCall) -> None:
        backend, start = self._handle.backend, time.perf_counter()
        try:
            with _isolated(call):
                _step(self._compiled, call)
        except FAILURES + self._compile_errors as error:
            close_frames(error)
            self._give_up(error)
            return
        self.seconds += time.perf_counter() - start
        self.path = backend if isinstance(backend, str) else "compiled"
        self.reason = f"{self.name} x {len(self.members)} compiled in {self.seconds:.1f} s"

    def _give_up(self, error: BaseException | str) -> None:
        self.path = "eager"
        why = error if isinstance(error, str) else f"{type(error).__name__}: {_first_lines(error)}"
        self.reason = f"{self.name} x {len(self.members)} not compiled: {why}"
        logger.warning(f"layer_compile: {self.reason}; layer_compile='off' spares the attempt")
        self._handle.changed()


def _is_dense(name: str, weight: Tensor) -> bool:
    """Return whether it is a matrix that each token meets: expert stacks are not, which in 4 bits are parametrized."""
    return weight.dim() == 2 and ".parametrizations." not in name


def _values(weight: Tensor) -> int:
    """Return the number of values of a weight; bytes of one in 4 bits hold two each."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


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


def _step(run: Callable[[LayerCall, Tensor], Any], call: LayerCall) -> None:
    """Run forward and backward. The gradients go to nobody: no ``.grad``, no hook of a reducer or of the user."""
    hidden = call.hidden.detach().requires_grad_()
    roots = [tensor for tensor in tensors_in(run(call, hidden)) if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in roots]
    torch.autograd.grad(roots, [hidden, *_trained(call.layer)], ones, allow_unused=True)


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
