"""Plans that outlive a checkpointed forward: the recompute of a layer re-uses the plan that its forward made.

The plans hang on the checkpoint call itself, so the recompute finds its own whatever the order of backward passes, and
they die with the graph of an aborted step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.checkpoint_seam import Nesting, checkpoint_wrapped
from fastpack_trl.moe.routing import RoutingPlan, routing_plan


class PlanTape:
    """The plans of one checkpointed call, in the order in which its experts blocks ran."""

    def __init__(self) -> None:
        self.plans: list[RoutingPlan] = []
        self.place = 0

    def next(self, ids_tk: Tensor, make: Callable[[], RoutingPlan]) -> RoutingPlan:
        """Return the plan of the block that runs now: that of an earlier run of the same call, else a new one."""
        place, self.place = self.place, self.place + 1
        if place >= len(self.plans) or self.plans[place].inverse.shape != ids_tk.shape:
            self.plans[place:] = [make()]  # what followed belongs to other activations
        return self.plans[place]


class PlanKeeper:
    """Source of the plan of an experts block: a new one, or that of the forward that is being recomputed.

    Attributes:
        sorts: how many plans were made.
        tape: of the checkpointed call that runs now, else None.
        check: compare a re-used plan with the expert ids; asks the device, for debugging.
    """

    def __init__(self, num_experts: int, *, check: bool = False) -> None:
        self.num_experts = num_experts
        self.check = check
        self.sorts = 0
        self.tape: PlanTape | None = None

    def plan(self, ids_tk: Tensor) -> RoutingPlan:
        """Return the plan for these (T, k) expert ids.

        Raises:
            RuntimeError: with `check`, the recompute routed tokens differently from the forward.
        """
        if self.tape is None or torch.compiler.is_compiling():  # a compiled graph holds its own sort
            return self._make(ids_tk)
        plan = self.tape.next(ids_tk, partial(self._make, ids_tk))
        # In forward too: selective checkpointing wants the operators of the recompute to have run there.
        if self.check and not plan.matches(ids_tk):
            raise RuntimeError(
                "the recompute of a checkpointed layer routed tokens to other experts than its forward: the layer is "
                "not deterministic; set preserve_rng_state=True, or train without gradient checkpointing"
            )
        return plan

    def _make(self, ids_tk: Tensor) -> RoutingPlan:
        if not torch.compiler.is_compiling():
            self.sorts += 1
        return routing_plan(ids_tk, self.num_experts)


def _with_tape(
    keepers: Sequence[PlanKeeper], inner: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a checkpointed layer with a tape around this call of it."""
    if torch.compiler.is_compiling():
        return inner(function, *args, **kwargs)
    return inner(partial(_run, keepers, PlanTape(), function), *args, **kwargs)


def _run(keepers: Sequence[PlanKeeper], tape: PlanTape, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the layer, in forward and again in the recompute, with the same tape."""
    outer = [keeper.tape for keeper in keepers]
    tape.place = 0
    for keeper in keepers:
        keeper.tape = tape
    try:
        return function(*args, **kwargs)
    finally:  # also when the recompute stops early, which it does by an exception
        for keeper, before in zip(keepers, outer, strict=True):
            keeper.tape = before


@contextlib.contextmanager
def plans_kept(model: nn.Module, keepers: dict[nn.Module, PlanKeeper]) -> Iterator[None]:
    """Give every checkpointed layer of `model` that holds experts a tape per call.

    Args:
        model: what holds the layers.
        keepers: per experts module.
    """
    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            own = [keepers[module] for module in layer.modules() if module in keepers]
            if own and hasattr(layer, "gradient_checkpointing"):
                stack.enter_context(checkpoint_wrapped(layer, partial(_with_tape, own), Nesting.PLANS))
        yield
