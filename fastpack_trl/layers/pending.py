"""Tensors that are put off until the kernel that takes them in: the norm of a head, and a sum with the residual.

Each stands between what makes a tensor and what reads it. A fused layer takes its parts; anything
else, such as an operator, an attribute or a function of torch, makes the tensor first and uses that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.kernels.fused_form import NormForm
from fastpack_trl.kernels.norm import add_norm, norm
from fastpack_trl.model.upstream import tree_map_only

_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
# Python looks up operators in the class.
_OPERATORS = (
    *("__sub__", "__mul__", "__truediv__", "__matmul__", "__pow__", "__neg__", "__getitem__"),
    *("__rsub__", "__rmul__", "__rtruediv__", "__lt__", "__gt__", "__le__", "__ge__"),
)


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


def _of_tensor(name: str) -> Any:
    return lambda self, *args: getattr(self.tensor, name)(*args)


class Pending:
    """A tensor that is made when something reads it; `x` has its shape and dtype.

    It holds no reference to itself: its tensors go with the last reference to it, not with the next garbage collection.
    """

    def __init__(self, x: Tensor) -> None:
        self.x, self._has_grad = x, torch.is_grad_enabled()
        self._tensor: Tensor | None = None

    def _make(self) -> Tensor:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def dim(self) -> int:
        return self.x.dim()

    @property
    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it is read inside of an autograd function that got this object instead of a tensor.
        """
        if self._tensor is None:
            if torch.is_grad_enabled() != self._has_grad:
                raise RuntimeError(
                    "fused_layers: a result that is put off is read in an autograd function or under no_grad, where it "
                    "has no gradient: set fused_layers='off'"
                )
            self._tensor = self.x = self._make()
        return self._tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __add__(self, other: Any) -> Any:
        return self.tensor + other

    def __radd__(self, other: Any) -> Any:
        return other + self.tensor

    __sub__, __mul__, __truediv__, __matmul__, __pow__, __neg__, __getitem__ = map(_of_tensor, _OPERATORS[:7])
    __rsub__, __rmul__, __rtruediv__, __lt__, __gt__, __le__, __ge__ = map(_of_tensor, _OPERATORS[7:])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ADDITIONS and not kwargs and isinstance(args[1], Addend) and args[1].can_join(args[0]):
            return Sum(args[0], args[1].x)
        args, kwargs = tree_map_only(Pending, tensor_of, (args, kwargs or {}))
        return function(*args, **kwargs)


class PendingNorm(Pending):
    """``norm(x, weight)`` of each head, which a rotation takes into its kernel.

    One transpose is put off too, that before a rotation; the next one is of an attention without one.
    """

    def __init__(self, x: Tensor, weight: Tensor, form: NormForm, moved: bool = False) -> None:
        super().__init__(x)
        self.weight, self.form, self._moved = weight, form, moved

    def _make(self) -> Tensor:
        return norm(self.x, self.weight, None, self.form)

    def transpose(self, first: int, second: int) -> Any:
        of_norm = self.dim() - 1 in (first % self.dim(), second % self.dim())
        if of_norm or self._moved or self._tensor is not None:
            return self.tensor.transpose(first, second)
        return PendingNorm(self.x.transpose(first, second), self.weight, self.form, moved=True)


class Addend(Pending):
    """The output of an attention layer, whose sum with the residual is put off."""

    def _make(self) -> Tensor:
        return self.x

    def can_join(self, other: Any) -> bool:
        """Return whether a kernel adds it to `other`; without its gradient it cannot (`tensor` raises why)."""
        is_alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (self.shape, self.dtype)
        return is_alike and torch.is_grad_enabled() == self._has_grad


class Sum(Pending):
    """``x + y``, which a norm takes into its kernel."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x)
        self._y: Any = y
        self._versions = _version(x), _version(y)

    def _make(self) -> Tensor:
        self._check()
        y, self._y = self._y, None  # a sum that is made keeps neither
        return self.x + y

    def normed(self, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> Tensor:
        """Return the norm of the sum, and make the sum in the same kernel if it is not made."""
        if self._tensor is not None or torch.is_grad_enabled() != self._has_grad:
            return norm(self.tensor, weight, bias, form)
        self._check()
        self._tensor, out = add_norm(self.x, self._y, weight, bias, form)
        self.x, self._y = self._tensor, None
        return out

    def _check(self) -> None:
        if self._versions != (_version(self.x), _version(self._y)):
            raise RuntimeError(
                "fused_layers: a layer changes the residual or the output of attention in place before their sum is "
                "read: set fused_layers='off'"
            )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def tensor_of(x: Any) -> Any:
    """Return the tensor of one that is put off, other values as they are."""
    return x.tensor if isinstance(x, Pending) else x
