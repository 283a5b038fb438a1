"""The gate of an experts block: its form, which the kernels read, and its formula in plain torch.

A block's first projection gives gate and up halves, concatenated or interleaved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gate:
    """The function from the pre-activation ``h`` (S, 2I) of a block to its activation ``a`` (S, I).

    Attributes:
        kind: ``silu``: ``silu(gate) * up``; ``clamped``: gpt-oss' form, ``(up + 1) * gate * sigmoid(alpha * gate)``
            with gate clamped from above and up from both sides at `limit`; ``model``: the model's function.
        interleaved: gate and up alternate (``h[:, ::2]``, ``h[:, 1::2]``) instead of lying in halves.
        alpha, limit: of ``clamped``.
        function: the model's function of ``h``, for ``model``.
    """

    kind: Literal["silu", "clamped", "model"]
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    function: Callable[[Tensor], Tensor] | None = None

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of gate and up."""
        if self.interleaved:
            return h[:, ::2], h[:, 1::2]
        middle = h.shape[1] // 2
        return h[:, :middle], h[:, middle:]

    def activation(self, h: Tensor) -> Tensor:
        """Return ``a`` (S, I) in plain torch."""
        if self.function is not None:
            return self.function(h)
        first, up = self.halves(h)
        if self.kind == "silu":
            return F.silu(first) * up
        first, up = first.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return torch.sigmoid(first * self.alpha) * first * (up + 1)


@functools.cache
def passes_at_bounds() -> bool:
    """Return whether torch's `clamp` has a gradient where its input is a bound: yes in 2.13, no in 2.15."""
    with torch.inference_mode(False), torch.enable_grad():
        bound = torch.ones(1, requires_grad=True)
        (grad,) = torch.autograd.grad(bound.clamp(-1.0, 1.0), bound)
    return bool(grad)
