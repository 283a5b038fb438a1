"""The gate before a comparison of trainers is timed: both must compute the same losses on the same micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fastpack_trl.errors import UserError
from fastpack_trl.model.changes import patch_attribute

FLOAT32_TOLERANCE = 1e-5
LOSS, GRADIENT_NORM = "loss", "gradient norm"
"""The figure that is compared; the second if the loss says little about the model."""
_DROPOUT_FIELDS = ("attention_dropout", "attn_dropout")


class LossParityError(UserError):
    """The sides of a comparison do not compute the same: a time would compare different work."""


def tolerance(dtype: str, figure: str = LOSS) -> float:
    """Return the largest relative difference of two losses that counts as rounding; of two gradient norms ten times it.

    In fp32 (and fp64) 1e-5: the same sums in another order differ by a few units of 6e-8, and the optimizer carries
    them on. In bf16 and fp16 the spacing of their numbers, `torch.finfo(dtype).eps` (0.8 % and 0.1 %): hidden states
    and logits are rounded to half of it in each operation, on both sides, in another order. A smaller difference says
    little about packing on an untrained model: `fastpack-trl verify` checks that documents do not mix. A gradient norm
    has the rounding of the forward pass and of the backward pass through all layers.
    """
    of_loss = float(torch.finfo(getattr(torch, dtype)).eps) if dtype in ("bfloat16", "float16") else FLOAT32_TOLERANCE
    return of_loss if figure == LOSS else 10 * of_loss


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drop nothing inside: sides that draw other random numbers would differ in their losses."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else _DROPOUT_FIELDS:
                value = getattr(module, name, None)
                if isinstance(value, float) and value > 0:
                    stack.enter_context(patch_attribute(module, name, 0.0))
        yield
