"""The gate before a comparison of trainers is timed: both must compute the same losses on the same micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

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


def check_losses(steps: Mapping[str, Sequence[tuple[int | None, float]]], dtype: str, figure: str = LOSS) -> None:
    """Check that two sides got the same tokens in their first steps, and compute the same loss.

    Args:
        steps: per side the digest of the tokens and the loss of each step, the reference first.
        dtype: in which they compute, e.g. ``bfloat16``.
        figure: `LOSS`, or the figure that is compared in its place.

    Raises:
        LossParityError: other tokens; a loss further apart than `tolerance`, or not finite. It names both and the step.
    """
    (first, expected), (name, own) = steps.items()
    allowed = tolerance(dtype, figure)
    for step, ((tokens, value), (own_tokens, own_value)) in enumerate(zip(expected, own, strict=False), 1):
        if own_tokens != tokens:
            raise LossParityError(
                f"{first} and {name} were given different tokens in step {step}: `build` must use the same data "
                "set, seed and batch size for each trainer, and no random shuffle of its own"
            )
        difference = abs(own_value - value) / (abs(value) or 1.0)
        if not difference <= allowed:  # a NaN is over every bound
            raise LossParityError(
                f"the {figure} of step {step} is {own_value!r} with {name} and {value!r} with {first}: "
                f"{difference:.1e} apart, allowed are {allowed:.0e} in {dtype}; no times are compared. "
                "`fastpack-trl verify --model ... --attn off` tells whether TRL keeps this model's documents apart;"
                " without the gate (gate_steps=0) the differences are only recorded"
            )


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[bool]:
    """Drop nothing inside: sides that draw other random numbers would differ in their losses.

    Yields:
        Whether there was any dropout.
    """
    found = False
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else _DROPOUT_FIELDS:
                value = getattr(module, name, None)
                if isinstance(value, float) and value > 0:
                    stack.enter_context(patch_attribute(module, name, 0.0))
                    found = True
        yield found
