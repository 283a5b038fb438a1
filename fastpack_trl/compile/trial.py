"""Forward and backward of one layer beside the run: nothing of the run sees them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[..., Any]
"""Hidden states, (1, total_tokens, hidden_size), to the output of a layer."""

CANNOT_RUN: tuple[type[Exception], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError, AssertionError,
)  # fmt: skip
"""What a compiler, a generated kernel or a traced layer raises; the compiler's own errors are `RuntimeError`."""
_ROUNDS = 5


@contextlib.contextmanager
def undisturbed(device: torch.device, hooked: bool) -> Iterator[None]:
    """The random state is as before afterwards; saved-tensor hooks around the run (offloading) see nothing."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        if hooked:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


@dataclass(frozen=True, slots=True)
class Path:
    """One way to run a layer."""

    run: Run
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Entered for forward and backward: a checkpointed layer is run again in backward."""


def step(path: Path, hidden: Tensor, layer: nn.Module) -> float:
    """Seconds of one forward and backward."""
    _wait(hidden.device)
    start = time.perf_counter()
    _results(path, hidden, layer)
    _wait(hidden.device)
    return time.perf_counter() - start


def median_times(paths: dict[str, Path], hidden: Tensor, layer: nn.Module) -> dict[str, float]:
    """Seconds of a layer step on each path: medians of interleaved rounds, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for count in range(_ROUNDS + 1):
        for name, path in paths.items():
            seconds = step(path, hidden, layer)
            if count:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def difference(path: Path, eager: Path, hidden: Tensor, layer: nn.Module) -> tuple[float, float]:
    """How far output and gradients of `path` are from eager's, and how far they may be; relative, all together.

    May be: four times what one rounding of the input, in the dtype that the layer computes in, changes in eager.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    signs = torch.randint_like(hidden, 2) * 2 - 1
    rounded = hidden * (1 + signs * torch.finfo(dtype).eps)
    own, ours, noisy = (
        _results(one, values, layer) for one, values in ((eager, hidden), (path, hidden), (eager, rounded))
    )
    return _distance(ours, own), 4 * _distance(noisy, own)


def _results(path: Path, hidden: Tensor, layer: nn.Module) -> list[Tensor]:
    """Output and gradients. They are returned to nobody else: no ``.grad``, no hook of a reducer or of the user."""
    hidden = hidden.detach().requires_grad_()
    inputs = [hidden, *_trained(layer)]
    with path.around():
        roots = [tensor for tensor in _tensors(path.run(hidden)) if tensor.requires_grad]
        grads = torch.autograd.grad(roots, inputs, [torch.ones_like(tensor) for tensor in roots], allow_unused=True)
    return [*roots, *(grad for grad in grads if grad is not None)]


def _distance(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The mean over tensors of ``|actual - expected| / |expected|`` in the 2-norm."""
    parts = [
        float((a.detach().double() - e.detach().double()).norm() / e.detach().double().norm().clamp_min(1e-30))
        for a, e in zip(actual, expected, strict=True)
    ]
    return statistics.fmean(parts)


def _trained(layer: nn.Module) -> Iterator[Tensor]:
    """What a step trains, as the layer reads it.

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


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list | dict):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _tensors(item)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
