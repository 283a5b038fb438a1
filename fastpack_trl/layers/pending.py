"""The norm of each head of queries or keys, put off until a rotation takes it into its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastpack_trl.kernels.fused_form import NormForm
from fastpack_trl.kernels.norm import norm


class _Active(threading.local):
    """The attention layer that runs on this thread: its rotations by name, and the norms that they may take over."""

    turns: dict[str, Callable[..., Any]] = {}  # noqa: RUF012
    norms: tuple[nn.Module, ...] = ()


active = _Active()


@contextmanager
def running(turns: dict[str, Callable[..., Any]], norms: tuple[nn.Module, ...]) -> Iterator[None]:
    """Offer the rotations of an attention layer, and the norms of its heads, while its forward runs."""
    before = active.turns, active.norms
    active.turns, active.norms = turns, norms
    try:
        yield
    finally:
        active.turns, active.norms = before


# Python looks up operators in the class.
_OPERATORS = "__add__", "__sub__", "__mul__", "__truediv__", "__matmul__"
_OTHERS = "__radd__", "__rsub__", "__rmul__", "__neg__", "__getitem__"


def _of_tensor(name: str) -> Any:
    return lambda self, *args: getattr(self.tensor, name)(*args)


class Pending:
    """Stands for ``norm(x, weight)`` between the norm's module and what reads it.

    A rotation takes `x`, `weight` and `form`; a transpose is put off too. Whatever else an attention does with it, such
    as an operator, an attribute or a function of torch, makes the tensor first and uses that.
    """

    def __init__(self, x: Tensor, weight: Tensor, form: NormForm) -> None:
        self.x, self.weight, self.form = x, weight, form
        self._has_grad = torch.is_grad_enabled()
        self._tensor: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def dim(self) -> int:
        return self.x.dim()

    def transpose(self, first: int, second: int) -> Any:
        if self.dim() - 1 in (first % self.dim(), second % self.dim()):  # the axis of the norm
            return self.tensor.transpose(first, second)
        return Pending(self.x.transpose(first, second), self.weight, self.form)

    @property
    def tensor(self) -> Tensor:
        """The norm itself.

        Raises:
            RuntimeError: it is read inside of an autograd function that got this object instead of a tensor.
        """
        if self._tensor is None:
            if torch.is_grad_enabled() != self._has_grad:
                raise RuntimeError(
                    "fused_layers: an attention passes queries or keys to an autograd function before they are "
                    "rotated, which would lose their gradient: set fused_layers='off'"
                )
            self._tensor = norm(self.x, self.weight, None, self.form)
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    __add__, __sub__, __mul__, __truediv__, __matmul__ = map(_of_tensor, _OPERATORS)
    __radd__, __rsub__, __rmul__, __neg__, __getitem__ = map(_of_tensor, _OTHERS)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Pending, lambda pending: pending.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)


def tensor_of(x: Any) -> Any:
    """Return the tensor of a pending norm, other values as they are."""
    return x.tensor if isinstance(x, Pending) else x
