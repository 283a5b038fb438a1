"""Forward and backward of one layer beside the run: nothing of the run sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.compile.graph import LayerCall, hooks_active, nothing_recorded, tensors_in
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.rounds import take_turns, timed
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.model.aside import buffers_kept

LayerRun = Callable[..., Any]
"""Hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

_ROUNDS = 5


@contextlib.contextmanager
def undisturbed(call: LayerCall) -> Iterator[None]:
    """Restore random state and buffers afterwards; outputs are not recorded, and no saved-tensor hook sees a tensor."""
    device = call.hidden.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(buffers_kept(call.layer))
        stack.enter_context(nothing_recorded())
        if hooks_active():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield


def step(run: LayerRun, call: LayerCall) -> float:
    """Return the seconds of one forward and backward."""
    return timed(partial(_differentiate, run, call), _clock(call))[1]


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
