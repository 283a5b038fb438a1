"""An exception inside of a checkpoint leaves no saved-tensor hook behind."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastpack_trl.errors import close_frames


def saved_by_a_product() -> int:
    """Tensors that a checkpoint left in place would count as its own."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return 0 if top is None else 1


def fail(x: torch.Tensor) -> torch.Tensor:
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
    close_frames(kept[0])
    assert saved_by_a_product() == 0
