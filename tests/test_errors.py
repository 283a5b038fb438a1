"""An exception inside of a checkpoint leaves no saved-tensor hook behind."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastpack_trl.errors import close_frames

LOCALS: list[weakref.ref[torch.Tensor]] = []


def saved_by_a_product() -> int:
    """Tensors that a checkpoint left in place would count as its own."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return 0 if top is None else 1


def fail(x: torch.Tensor) -> torch.Tensor:
    local = torch.ones(2)
    LOCALS.append(weakref.ref(local))
    raise RuntimeError(f"no memory for {x.shape}")


@pytest.mark.parametrize("causes", [False, True])
def test_hooks_are_gone_when_the_exception_is_still_held(causes: bool) -> None:
    kept: list[BaseException] = []
    try:
        try:
            checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=False)
        except RuntimeError as error:
            if not causes:
                raise
            raise ValueError("cannot compile") from error
    except (RuntimeError, ValueError) as error:
        kept.append(error)  # as a cycle would, until the collector runs
    assert LOCALS[-1]() is not None
    close_frames(kept[0])
    assert LOCALS[-1]() is None
    assert saved_by_a_product() == 0
