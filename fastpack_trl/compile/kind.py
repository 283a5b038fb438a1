"""Decoder layers of one kind: tried on their first packed row, then compiled or left eager."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.compile.cached import keep, note_of, was_compiled
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
from fastpack_trl.measure.rounds import take_turns, timed
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.model.changes import restore_buffers
from fastpack_trl.model.checkpoint_seam import is_reentrant

logger = logging.getLogger(__name__)

LayerRun = Callable[..., Any]
"""Hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

COMPILE_SECONDS = 8.0
"""Seconds that one kind of layer is taken to compile, before it is known.

On an H200 7 to 9 s were measured for dense layers, 13 s while other processes had its host; 10 and 6 s for the two
kinds of gpt-oss.
"""
CACHED_SHARE = 0.2
"""Share of it where Inductor's cache has the graph: tracing and loading, measured there."""
_ROUNDS = 5
MOST_SAVED = 0.4
"""Share of an eager layer step that compiling is taken to save, before it is known; 0.2 to 0.42 were measured there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the kinds of one model share; see `compiled_layers`."""

    backend: str | Callable[..., Any]
    measure: bool
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
        reason: what was measured, or why it is not compiled.
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
        first, trial = self.path == "pending", call.for_trial()
        paths: dict[str, LayerRun] = {"eager": stock if trial is call else trial.eagerly}
        with self._beside_the_run(call):
            if not first or self._pays(paths, call):
                paths["compiled"] = partial(self._compiled, trial)
                if self._compile(paths["compiled"], call) and first and self._options.measure:
                    self._choose(paths, call)
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

    def _pays(self, paths: dict[str, LayerRun], call: LayerCall) -> bool:
        """Return whether the steps that are left can pay for compiling, by an eager layer step; said where not."""
        if self._options.left is None:
            return True
        try:
            eager = median_times(paths, call)["eager"]
        except FAILURES as error:  # the compiled step will tell
            close_frames(error)
            return True
        left, cached = self._options.left(), was_compiled(self._note(call))
        seconds = COMPILE_SECONDS * (CACHED_SHARE if cached else 1)
        cost = StartUpCost(seconds, MOST_SAVED * eager * len(self.members) * left.rows)
        if cost.pays(left.steps):
            return True
        self.path, self.unpaid = "eager", True
        self.reason = (
            f"{self.name} x {len(self.members)} not compiled: {left.steps:,} steps left, {seconds:.0f} s"
            f"{' with the cache of an earlier run' if cached else ''} would pay from {math.ceil(cost.steps):,} on; "
            f"eager {1000 * eager:.2f} ms {_per_row(call)}"
        )
        self._options.say(f"layer_compile: {self.reason}")
        return False

    def _compile(self, compiled: LayerRun, call: LayerCall) -> bool:
        options = self._options
        options.say(f"layer_compile: compiling {self.name} ...", end=" ")
        try:
            _, seconds = timed(partial(_differentiate, compiled, call), _clock(call))
        except FAILURES + self._compile_errors as error:
            close_frames(error)
            options.say("failed")
            self._give_up(error)
            return False
        except BaseException:
            options.say("stopped")
            raise
        options.say(f"{seconds:.1f} s")
        keep(self._note(call))
        self.seconds += seconds
        self.path = options.backend if isinstance(options.backend, str) else "compiled"
        self.reason = f"{self.name} x {len(self.members)} compiled in {self.seconds:.1f} s"
        return True

    def _note(self, call: LayerCall) -> Path | None:
        """Return the file by which a later run knows that this was compiled."""
        if self._options.backend != "inductor":
            return None
        at, half = call.hidden, torch.is_autocast_enabled(call.hidden.device.type)
        return note_of(call.layer, (call.place, call.names, call.hooks_outside, *sorted(call.kwargs), at.dtype, half))

    def _choose(self, paths: dict[str, LayerRun], call: LayerCall) -> None:
        """Take the fastest."""
        times = median_times(paths, call)
        seen = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in times.items())
        self.reason += f"; {seen} {_per_row(call)}"
        if times["eager"] <= times["compiled"]:
            self.path = "eager"

    def _give_up(self, error: BaseException | str) -> None:
        self.path = "eager"
        said = error if isinstance(error, str) else f"{type(error).__name__}: {_first_lines(error)}"
        self.reason = f"{self.name} x {len(self.members)} not compiled: {said}"
        logger.warning(f"layer_compile: {self.reason}; layer_compile='off' spares the attempt")
        self._options.on_change()


def _per_row(call: LayerCall) -> str:
    return f"per layer and row of {call.hidden.shape[1]:,} tokens"


def _first_lines(error: BaseException) -> str:
    """Return what an error says first; the compiler's errors have the cause below a heading and a command."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines[1:] if "rror" in line and "TORCHDYNAMO" not in line]
    said = " ".join([*lines[:1], *(causes or [line for line in lines[1:2] if "TORCHDYNAMO" not in line])[:1]])[:300]
    if isinstance(first_cause(error), OSError) or "[Errno" in said:
        said += "; set TORCHINDUCTOR_CACHE_DIR to a folder with room that can be written"
    return said


def median_times(paths: dict[str, LayerRun], call: LayerCall) -> dict[str, float]:
    """Return the seconds of a layer step on each path: medians of interleaved rounds, after an uncounted one."""
    sides = {name: partial(_differentiate, run, call) for name, run in paths.items()}
    rounds = take_turns(sides, rounds=_ROUNDS, clock=_clock(call), loud=FAILURES)
    return {name: rounds.time(name).median for name in paths}


def _clock(call: LayerCall) -> Clock:
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
