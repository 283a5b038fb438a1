"""The check of one step that the comparisons of `benchmarks/` still use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastpack_trl.bench.gate import GRADIENT_NORM, LOSS, LossParityError, tolerance, without_dropout

__all__ = ["GRADIENT_NORM", "LOSS", "LossParityError", "check_step", "tolerance", "without_dropout"]


def check_step(
    step: int, found: Mapping[str, tuple[str, float]], dtype: torch.dtype | None, figure: str = LOSS
) -> None:
    """Check that all sides were given the same micro-batches in a step, and compute the same loss.

    Args:
        step: counted from 1.
        found: digest of the tokens (`digest_of`) and loss of each side, the reference first.
        dtype: in which they compute; None where losses may differ.
        figure: `LOSS`, or what stands for it.

    Raises:
        LossParityError: other tokens; a loss further apart than `tolerance`, or not finite. It names both and the step.
    """
    (first, (tokens, expected)), *others = found.items()
    for name, (own_tokens, own) in others:
        if own_tokens != tokens:
            raise LossParityError(
                f"{first} and {name} were given different micro-batches in step {step}: `build` must use the same data "
                "set, seed and batch size for each trainer, and no random shuffle of its own"
            )
        apart, allowed = (
            abs(own - expected) / (abs(expected) or 1.0),
            0.0 if dtype is None else tolerance(dtype, figure),
        )
        if dtype is not None and not apart <= allowed:  # a NaN is over every bound
            raise LossParityError(
                f"the {figure} of step {step} is {own!r} with {name} and {expected!r} with {first}: {apart:.1e} apart, "
                f"allowed are {allowed:.0e} in {str(dtype).removeprefix('torch.')}; nothing was timed. "
                "`fastpack-trl verify --model ... --attn off` tells whether stock keeps this model's documents apart; "
                "without the gate (gate_steps=0) the differences are only recorded"
            )
