"""Decoder layers of one kind: compiled on their first packed row, if the steps that are left pay for it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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
    packed_call,
    tensors_in,
)
from fastpack_trl.errors import close_frames, first_cause
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.payback import StartUpCost, StepsLeft
from fastpack_trl.measure.timing import clock_of, timed
from fastpack_trl.model.changes import restore_buffers
from fastpack_trl.model.checkpoint_seam import is_reentrant

logger = logging.getLogger(__name__)

LayerRun = Callable[..., Any]
"""Hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

COMPILE_SECONDS = 8.0
"""Seconds that compiling one kind of layer takes: 7 to 9 on an H200 for dense layers, 10 and 6 for those of gpt-oss."""
SAVED = 0.3
"""Share of an eager layer step that compiling saves: 0.2 to 0.42 there. In 71 comparisons it was never slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the kinds of one model share; see `compiled_layers`."""

    backend: str | Callable[..., Any]
    left: Callable[[], StepsLeft] | None
    early: Callable[[], bool] | None
    hooks_outside: bool
    on_change: Callable[[], None]
    verbose: bool

    def say(self, text: str, end: str = "\n") -> None:
        if self.verbose:
            print(text, end=end, file=sys.stderr, flush=True)


class LayerKind:
    """Layers that share one compiled graph: same class, window and inner modules.

    Attributes:
        name: the class, e.g. ``LlamaDecoderLayer``.
        members: the layers.
        path: ``pending`` until the first packed row, then ``inductor`` (or the name of another backend) or ``eager``.
        reason: how long it took, or why it is not compiled.
        seconds: of the first forward and backward of each graph, compilation included; 0 before.
        unpaid: it is not compiled because too few steps are left.
    """

    def __init__(self, layers: list[nn.Module], options: Options) -> None:
        import torch._dynamo.exc as exc  # takes a second to load: only where layers are compiled

        self.name = type(layers[0]).__name__
        self.members = layers
        self.path = "pending"
        self.reason = ""
        self.seconds = 0.0
        self.unpaid = False
        self._options = options
        self._tried: set[str] = set()
        self._graph: CompiledLayer | None = None
        self._compile_errors = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit, OSError)

    def run(self, layer: Any, checkpoint: Any, stock: LayerRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one layer of this kind.

        Args:
            layer: the layer.
            checkpoint: its `_gradient_checkpointing_func`; None where it is not checkpointed.
            stock: the layer as it is; called with the hidden states.
            args, kwargs: of the layer.
        """
        call = packed_call(layer, checkpoint, args, kwargs, hooks_outside=self._options.hooks_outside)
        if call is None:
            return stock(*args[:1])
        place = call.place
        if place not in self._tried:
            if self._options.early is not None and self._options.early():
                return stock(args[0])
            self._tried.add(place)
            self._decide(call, stock)
            if self.path == "eager":
                return stock(args[0])
        try:
            output, records = self._compiled(call, call.hidden)
        except self._compile_errors as error:
            # Raised while a new shape or type was compiled, before anything ran.
            close_frames(error)
            self._give_up(error)
            return stock(args[0])
        hand_over(records)
        return output

    def _compiled(self, call: LayerCall, hidden: Tensor) -> tuple[Any, Recorded]:
        if self._graph is None:  # only now: `torch.compile` itself fails where Inductor's cache cannot be written
            self._graph = CompiledLayer(self.name, self._options.backend)
        return self._graph(call, hidden)

    def _decide(self, call: LayerCall, stock: LayerRun) -> None:
        """Compile forward and backward on a copy of the layer's input, before anything depends on them."""
        if is_reentrant(call.checkpoint):
            self._give_up("reentrant checkpointing: set gradient_checkpointing_kwargs={'use_reentrant': False}")
            return
        trial = call.for_trial()
        with self._beside_the_run(call):
            if self.path != "pending" or self._pays(stock if trial is call else trial.eagerly, call):
                self._compile(partial(self._compiled, trial), call)
        self._options.on_change()

    @contextmanager
    def _beside_the_run(self, call: LayerCall) -> Iterator[None]:
        """Restore random state and buffers afterwards; nothing is recorded, no saved-tensor hook sees a tensor."""
        device = call.hidden.device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            stack.enter_context(restore_buffers(call.layer))
            stack.enter_context(nothing_recorded())
            if hooks_active():
                stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
            yield

    def _pays(self, eager: LayerRun, call: LayerCall) -> bool:
        """Return whether the steps that are left pay for compiling, by one eager layer step; the report says if not."""
        if self._options.left is None:
            return True
        try:
            seconds = [timed(partial(_differentiate, eager, call), _clock(call))[1] for _ in range(2)][-1]
        except FAILURES as error:  # the compiled step will tell
            close_frames(error)
            return True
        left = self._options.left()
        cost = StartUpCost(COMPILE_SECONDS, SAVED * seconds * len(self.members) * left.rows)
        if cost.pays(left.steps):
            return True
        self.path, self.unpaid = "eager", True
        self.reason = (
            f"{self.name} x {len(self.members)} not compiled: {left.steps:,} steps left, {COMPILE_SECONDS:.0f} s would "
            f"pay from {math.ceil(cost.steps):,} on; eager {1000 * seconds:.2f} ms per layer and row of "
            f"{call.hidden.shape[1]:,} tokens"
        )
        self._options.say(f"layer_compile: {self.reason}")
        return False

    def _compile(self, compiled: LayerRun, call: LayerCall) -> None:
        options = self._options
        options.say(f"layer_compile: compiling {self.name} ...", end=" ")
        try:
            _, seconds = timed(partial(_differentiate, compiled, call), _clock(call))
        except FAILURES + self._compile_errors as error:
            close_frames(error)
            options.say("failed")
            self._give_up(error)
            return
        except BaseException:
            options.say("stopped")
            raise
        options.say(f"{seconds:.1f} s")
        self.seconds += seconds
        self.path = options.backend if isinstance(options.backend, str) else "compiled"
        self.reason = f"{self.name} x {len(self.members)} compiled in {self.seconds:.1f} s"

    def _give_up(self, error: BaseException | str) -> None:
        self.path = "eager"
        said = error if isinstance(error, str) else f"{type(error).__name__}: {_first_lines(error)}"
        self.reason = f"{self.name} x {len(self.members)} not compiled: {said}"
        logger.warning(f"layer_compile: {self.reason}; layer_compile='off' spares the attempt")
        self._options.on_change()


def _first_lines(error: BaseException) -> str:
    """Return what an error says first; the compiler's errors have the cause below a heading and a command."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines[1:] if "rror" in line and "TORCHDYNAMO" not in line]
    said = " ".join([*lines[:1], *(causes or [line for line in lines[1:2] if "TORCHDYNAMO" not in line])[:1]])[:300]
    if isinstance(first_cause(error), OSError) or "[Errno" in said:
        said += "; set TORCHINDUCTOR_CACHE_DIR to a folder with room that can be written"
    return said


def _clock(call: LayerCall) -> Any:
    return clock_of(call.hidden.device.type, call.hidden.device)


def _differentiate(run: LayerRun, call: LayerCall) -> None:
    """Run forward and backward. The gradients go to nobody: no ``.grad``, no hook of a reducer or of the user."""
    hidden = call.hidden.detach().requires_grad_()
    roots = [tensor for tensor in tensors_in(run(hidden)) if tensor.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in roots]
    torch.autograd.grad(roots, [hidden, *_trained(call.layer)], ones, allow_unused=True)


def _trained(layer: nn.Module) -> Iterator[Tensor]:
    """Yield what a step trains, as the layer reads it.

    Where adapters were cast together for the whole model (`apply_lora`) those casts stand for them: a gradient of the
    parameters would go through a graph that is not this layer's, and the run still needs it.
    """
    casts = [cast for module in layer.modules() if (cast := getattr(module, "fastpack_cast", None)) is not None]
    made = {id(parameter) for cast in casts for parameter in cast.made_from[:2]}
    for cast in casts:
        yield from (tensor for tensor in (cast.a, cast.b) if tensor.requires_grad)
    # A hook on a parameter would see each gradient that is asked for.
    parameters = (p for p in layer.parameters() if p.requires_grad and not p._backward_hooks)
    yield from (p for p in parameters if id(p) not in made)
