"""The routing plan of a layer: its slots sorted by expert once, and everything that follows from that order.

The recompute of a checkpointed layer re-uses the plan that its forward made. Plans hang on the checkpoint call itself,
so the recompute finds its own whatever the order of backward passes, and they die with the graph of an aborted step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.checkpoint_seam import Nesting, checkpoint_wrapped


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPlan:
    """The order of the ``S = T * k`` routed slots of a layer by expert.

    Two tokens, two experts each: ``ids = [[1, 0], [1, 2]]`` -> slots sorted by expert ``perm = [1, 0, 2, 3]``, so
    ``expert = [0, 1, 1, 2]``, ``token = [0, 0, 1, 1]``, ``inverse = [[1, 0], [2, 3]]``, ``offsets = [1, 3, 4]``.

    Attributes:
        perm: (S,) int32, flat slot (``t * k + j``) at each sorted place. Stable: slots of an expert keep their order.
        inverse: (T, k) int32, sorted place of each slot.
        expert: (S,) int32, expert at each sorted place.
        offsets: (E,) int32, end of each expert's rows; the last one is S.
    """

    perm: Tensor
    inverse: Tensor
    expert: Tensor
    offsets: Tensor

    @property
    def token(self) -> Tensor:
        """Return (S,) int32, the token at each sorted place."""
        return torch.div(self.perm, self.inverse.shape[1], rounding_mode="floor")

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the four fields in order."""
        return self.perm, self.inverse, self.expert, self.offsets

    def sorted_weights(self, weights_tk: Tensor) -> Tensor:
        """Return the (S,) routing weights in sorted order."""
        return weights_tk.reshape(-1).index_select(0, self.perm)

    def matches(self, ids_tk: Tensor) -> bool:
        """Return whether this plan was made from these expert ids. Synchronises: for debugging only."""
        return bool((ids_tk.reshape(-1).index_select(0, self.perm) == self.expert).all())


def routing_plan(ids_tk: Tensor, num_experts: int) -> RoutingPlan:
    """Sort the slots of a layer by expert: one stable sort, no host sync, deterministic.

    Args:
        ids_tk: (T, k) expert ids below `num_experts`, any integer dtype.
        num_experts: E.
    """
    flat = ids_tk.detach().reshape(-1).to(torch.int32)
    expert, order = torch.sort(flat, stable=True)
    places = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(places).scatter_(0, order, places)
    # `bincount` asks the device for its length even with `minlength`; a search in the sorted ids does not.
    bounds = torch.arange(num_experts, dtype=torch.int32, device=flat.device)
    offsets = torch.searchsorted(expert, bounds, right=True, out_int32=True)
    return RoutingPlan(perm=order.to(torch.int32), inverse=inverse.view(ids_tk.shape), expert=expert, offsets=offsets)


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
        check: compare a re-used plan with the expert ids; synchronises, for debugging.
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
    """Give every checkpointed layer of `model` that holds experts a tape per call; `keepers` per experts module."""
    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            own = [keepers[module] for module in layer.modules() if module in keepers]
            if own and hasattr(layer, "gradient_checkpointing"):
                stack.enter_context(checkpoint_wrapped(layer, partial(_with_tape, own), Nesting.PLANS))
        yield
