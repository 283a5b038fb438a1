"""Gradients that stay in the same memory, for graphs that add to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradientBuffers:
    """One tensor per parameter, which is its ``.grad`` from the first micro-batch of a step on.

    A parameter without a gradient has none here either: to an optimizer zeros are not None, AdamW would decay the
    parameter.

    Args:
        parameters: with the gradients of an eager micro-batch, which become the buffers; the others are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self._buffers = [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def attach(self) -> None:
        """Make each buffer the gradient of its parameter: with what it has so far, or zeros where it has none."""
        fresh: list[Tensor] = []
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            gradient = parameter.grad
            if gradient is buffer or not parameter.requires_grad:  # frozen since: zeros are not None to an optimizer
                continue
            if gradient is None:
                fresh.append(buffer)
            else:  # set by a retry, or by a callback
                buffer.copy_(gradient)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)

    def were_written(self) -> None:
        """Count a replay as an edit of each gradient, as a backward pass does (`checkpointing.retry` reads it)."""
        torch.autograd.graph.increment_version(self._buffers)
