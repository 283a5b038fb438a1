"""`AsMade`: a tensor from which something was made, to tell whether it was edited since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_EDITED = -2  # no count of edits has this value


@dataclass(frozen=True, slots=True, eq=False)
class AsMade:
    """A tensor from which something was made, and its count of in-place edits then: batches are edited on their way.

    torch counts edits of a tensor and of its views. It does not count what is written past it: through ``.data``,
    NumPy or a kernel of one's own. A tensor that was made under ``torch.inference_mode`` has no counter.
    """

    tensor: Tensor
    edits: int

    @classmethod
    def of(cls, tensor: Tensor, *, edited: bool = False) -> AsMade:
        """Take `tensor` as it is now, or as one that was edited where it was copied from."""
        return cls(tensor, _EDITED if edited else _edits(tensor))

    def matches(self, tensor: object) -> bool:
        """Return whether `tensor` is the same object, without an edit since."""
        return tensor is self.tensor and self.edits == _edits(self.tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.tensor, not self.matches(self.tensor))  # a copy counts from somewhere else


def _edits(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _copied(tensor: Tensor, edited: bool) -> AsMade:
    return AsMade.of(tensor, edited=edited)
