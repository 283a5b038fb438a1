"""Gradients that stay in the same memory, for graphs that add to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class GradientBuffers:
    """One tensor per parameter, which is its ``.grad`` while a graph runs, and for as long as the parameter has one.

    A parameter without a gradient in an eager step has none here either: to an optimizer zeros are not None, AdamW
    would decay the parameter.

    Args:
        parameters: with the gradients of an eager micro-batch; those that have none are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self._buffers = [
            torch.zeros_like(parameter.grad) for parameter in self.parameters if parameter.grad is not None
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    @contextmanager
    def attached_if_all_goes_well(self) -> Iterator[None]:
        """Attach the buffers; after an exception parameters have the gradients that they had before."""
        before = [parameter.grad for parameter in self.parameters]
        self.attach()
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def attach(self) -> None:
        """Make each buffer the gradient of its parameter: with what it has so far, or zeros where it has none."""
        fresh: list[Tensor] = []
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            gradient = parameter.grad
            if gradient is buffer:
                continue
            if gradient is None:
                fresh.append(buffer)
            else:  # an eager micro-batch of this step made it
                buffer.copy_(gradient)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)
