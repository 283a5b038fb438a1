"""The routing plan of a layer: its slots sorted by expert once, and everything derived from that order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RoutingPlan(NamedTuple):
    """The order of the ``S = T * k`` routed slots of a layer by expert.

    Two tokens, two experts each: ``ids = [[1, 0], [1, 2]]`` -> slots sorted by expert ``perm = [1, 0, 2, 3]``, so
    ``expert = [0, 1, 1, 2]``, ``token = [0, 0, 1, 1]``, ``inverse = [[1, 0], [2, 3]]``, ``offsets = [1, 3, 4]``.
    """

    perm: Tensor
    """(S,) int32, flat slot (``t * k + j``) at each sorted place. Stable: slots of an expert keep their order."""
    inverse: Tensor
    """(T, k) int32, sorted place of each slot."""
    expert: Tensor
    """(S,) int32, expert at each sorted place."""
    offsets: Tensor
    """(E,) int32, end of each expert's rows; the last one is S."""

    @property
    def token(self) -> Tensor:
        """Return (S,) int32, the token at each sorted place."""
        return torch.div(self.perm, self.inverse.shape[1], rounding_mode="floor")

    @property
    def ids(self) -> Tensor:
        """Return the (T, k) expert ids."""
        return self.expert.index_select(0, self.inverse.reshape(-1)).view(self.inverse.shape)


def routing_plan(ids_tk: Tensor, num_experts: int) -> RoutingPlan:
    """Sort the slots of a layer by their expert ids, of any integer dtype: one stable sort, no sync, deterministic."""
    flat = ids_tk.detach().reshape(-1).to(torch.int32)
    expert, order = torch.sort(flat, stable=True)
    places = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(places).scatter_(0, order, places)
    # `bincount` synchronizes for its length even with `minlength`; a search in the sorted ids does not.
    bounds = torch.arange(num_experts, dtype=torch.int32, device=flat.device)
    offsets = torch.searchsorted(expert, bounds, right=True, out_int32=True)
    return RoutingPlan(perm=order.to(torch.int32), inverse=inverse.view(ids_tk.shape), expert=expert, offsets=offsets)
