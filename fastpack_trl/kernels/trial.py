"""The trial of a kernel before it is chosen: a few tokens, forward and backward, compared with plain torch in fp32.

Operators and packages move, and a build may lack a kernel. What fails in a trial would fail in the first step, or train
on wrong numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def failed_trial(name: str, device: str, most: float, error: Callable[[], float]) -> str:
    """Return why a kernel fails, or is off by more than `most`, on a device; logged. Empty if it is right."""
    try:
        off = error()
        wrong = "" if off <= most else f"its results are {off:.1%} off those of plain torch"  # NaN too
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # noqa: BLE001 - whatever a package or its compiler raises
        wrong = f"{type(raised).__name__}: {raised}"
    if not wrong:
        return ""
    reason = f"{name} failed its trial on this {device} ({wrong})"
    logger.warning(f"packed_attention: {reason}; another way is taken, and torch {torch.__version__} may be why")
    return reason


def largest_error(function: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """Return the largest relative error of the output and the gradients of `function`; NaN if one is.

    `reference` computes the same of the inputs in fp32.
    """
    sides = []
    for compute, tensors in ((function, inputs), (reference, [tensor.float() for tensor in inputs])):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            out = compute(*leaves)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
            sides.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    errors = [(one.float() - other).norm() / other.norm() for one, other in zip(*sides, strict=True)]
    return float(torch.stack(errors).max())
