"""An exception inside of a checkpoint leaves no saved-tensor hook behind."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from fastpack_trl.errors import close_frames


def saved_by_a_product() -> int:
    """Tensors that a checkpoint left in place would count as its own."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return 0 if top is None else 1


def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(f"no memory for {x.shape}")


def test_hooks_are_gone_when_the_exception_is_still_held() -> None:
    kept: list[BaseException] = []
    try:
        checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=False)
    except RuntimeError as error:
        kept.append(error)  # as a cycle would, until the collector runs
    close_frames(kept[0])
    assert saved_by_a_product() == 0


def test_causes_are_closed_too() -> None:
    def wrapped() -> None:
        try:
            checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=False)
        except RuntimeError as error:
            raise ValueError("cannot compile") from error

    kept: list[BaseException] = []
    try:
        wrapped()
    except ValueError as error:
        kept.append(error)
    close_frames(kept[0])
    assert saved_by_a_product() == 0
