"""The routing plan of a layer: its slots sorted by expert once, and everything that follows from that order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """Return whether this plan was made from these expert ids. Asks the device: for debugging only."""
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
