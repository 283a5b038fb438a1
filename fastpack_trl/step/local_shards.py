"""Clipping and optimizer step under FSDP 2 over what each process holds of gradients, weights and state.

torch takes lists of DTensors, but looks at each of them, and makes one of each norm. The same functions over the local
tensors inside compute the same, but for the order in which the norm is added up, without that work of the host.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.sharded import pieces, shard_group
from fastpack_trl.model.upstream import resolve

_KNOWN = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose step is element by element, in place, and of the state that they made in the first one."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor | None:
    """Clip as `torch.nn.utils.clip_grad_norm_` does over DTensors; return the norm, () whole in every process.

    Args:
        parameters: with a gradient, in the order of the model.
        max_norm: of all gradients together, in the 2-norm.

    Returns:
        None, with nothing done, where a gradient is not in pieces on the same processes as the others.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    group = shard_group(gradients)
    if group is None:
        return None
    held = pieces(gradients)
    norm = torch.nn.utils.get_total_norm(held)
    # As a DTensor adds up the norms of pieces.
    total = norm**2
    distributed.all_reduce(total, group=group)
    total = total**0.5
    stand_ins: Any = [SimpleNamespace(grad=gradient) for gradient in held]
    torch.nn.utils.clip_grads_with_norm_(stand_ins, max_norm, total)
    return total


@contextmanager
def local_steps(optimizer: Any) -> Iterator[None]:
    """Let ``optimizer.step`` run over local tensors in this context, where it can; else it is as it was.

    Args:
        optimizer: torch's own, as the scheduler of the learning rate has wrapped its ``step``.
    """
    stock = optimizer.step

    @functools.wraps(stock)  # the scheduler looks for its mark
    def step(_: Any, closure: Callable[[], float] | None = None) -> Any:
        trained = [] if closure is not None or _is_watched(optimizer) else _trained(optimizer)
        if not trained:
            return stock(closure)
        with _over_local(optimizer, trained):
            return stock()

    with patch_attribute(optimizer, "step", MethodType(step, optimizer)):  # a scheduler made later binds its function
        yield


def why_stock_step(optimizer: Any) -> str:
    """Return why an optimizer steps over DTensors; empty where it need not."""
    if type(optimizer) not in _KNOWN:
        return f"{type(optimizer).__name__} steps over DTensors"
    # Schedulers of the learning rate put a counter around it.
    replaced = vars(optimizer).get("step")
    if replaced is not None and getattr(replaced, "__globals__", None) is not vars(torch.optim.lr_scheduler):
        return f"the step of {type(optimizer).__name__} was replaced: it may look at DTensors"
    # Without either torch takes a loop over DTensors, and would not over plain tensors.
    if not all(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is neither fused nor foreach"
    return ""


def _is_watched(optimizer: Any) -> bool:
    """Return whether a hook of the user runs in the optimizer's step: it would see local tensors."""
    return any(getattr(optimizer, name, True) for name in _HOOKS) or any(_global_hooks())


@functools.cache
def _global_hooks() -> tuple[Any, ...]:
    # Where torch has none of that name, nobody knows: a step is watched.
    hooks = (resolve(f"torch.optim.optimizer._global_{name}_hooks") for name in ("optimizer_pre", "optimizer_post"))
    return tuple(True if one is None else one for one in hooks)


def _trained(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters with a gradient, where each is a DTensor whose state is there; else none."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [optimizer.state.get(parameter) for parameter in trained]
    ready = all(state and all(isinstance(value, Tensor) for value in state.values()) for state in states)
    return trained if ready and shard_group(trained) is not None else []


@contextmanager
def _over_local(optimizer: Any, trained: list[nn.Parameter]) -> Iterator[None]:
    """Give the optimizer local tensors of `trained`, its parameters in order, until the context ends."""
    whole, state = [group["params"] for group in optimizer.param_groups], optimizer.state
    # Not the pieces themselves, which would keep the gradients.
    own = [piece.detach() for piece in pieces(trained)]
    values = iter(pieces([value for parameter in trained for value in state[parameter].values()]))
    local_state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for parameter, tensor, gradient in zip(trained, own, pieces([p.grad for p in trained]), strict=True):
        tensor.grad = gradient
        local_state[tensor] = {name: next(values) for name in state[parameter]}
    left = iter(own)
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [next(left) for parameter in parameters if parameter.grad is not None]
        with patch_attribute(optimizer, "state", local_state):
            yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
