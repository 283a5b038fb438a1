"""Forward and backward of one layer beside the run: nothing of the run sees them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
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


def step(run: Run, hidden: Tensor, layer: nn.Module) -> float:
    """Seconds of one forward and backward. Gradients are returned to nobody: no ``.grad``, no hook of a reducer."""
    hidden = hidden.detach().requires_grad_()
    inputs = [hidden, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    _wait(hidden.device)
    start = time.perf_counter()
    output = run(hidden)
    output = output if isinstance(output, tuple) else (output,)
    roots = [tensor for tensor in output if isinstance(tensor, Tensor) and tensor.requires_grad]
    torch.autograd.grad(roots, inputs, [torch.ones_like(tensor) for tensor in roots], allow_unused=True)
    _wait(hidden.device)
    return time.perf_counter() - start


def median_times(paths: dict[str, Run], hidden: Tensor, layer: nn.Module) -> dict[str, float]:
    """Seconds of a layer step on each path: medians of interleaved rounds, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    for count in range(_ROUNDS + 1):
        for name, run in paths.items():
            seconds = step(run, hidden, layer)
            if count:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
