"""Figures of the quickstart: the promises that they must keep, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_FALL = 0.10  # of the full fine-tune's loss
# Fewer steps promise no fall of a loss: the first ones warm up.
PROMISING_STEPS, PROMISING_LORA_STEPS = 20, 5
# The same weights, input and kernels in float32: equal up to the order of a sum.
LOGIT_TOLERANCE = 1e-4

Figures = Mapping[str, Any]


def promises(figures: Figures) -> list[dict[str, Any]]:
    """Return name and text of what a run must show, and whether it is kept: None where so few steps promise nothing.

    A NaN keeps no promise.
    """
    settings, full, compared = figures["settings"], figures["full"], figures["comparison"]
    held_out, logits = figures["lora"]["held_out_loss"], figures["adapter"]["max_logit_difference"]
    difference, bound = compared["max_loss_difference"], compared["loss_difference_bound"]
    full_falls = full["last_loss"] <= (1 - LEAST_FALL) * full["first_loss"]
    lora_falls = len(held_out) > 1 and held_out[-1] < held_out[0]
    return [
        {
            "name": "full_loss_falls",
            "kept": None if settings["steps"] < PROMISING_STEPS else full_falls,
            "text": f"full fine-tune: loss {_path(_ends(full))}; a fall of {LEAST_FALL:.0%} or more is promised from "
            f"--steps {PROMISING_STEPS} on",
        },
        {
            "name": "lora_loss_falls",
            "kept": None if settings["lora_steps"] < PROMISING_LORA_STEPS else lora_falls,
            "text": f"LoRA: held-out loss {_path(held_out)}; a fall is promised from --lora_steps "
            f"{PROMISING_LORA_STEPS} on",
        },
        {
            "name": "adapter_reloads",
            "kept": logits <= LOGIT_TOLERANCE,
            "text": f"adapter in fresh objects: logits differ by {logits:.1e}, at most {LOGIT_TOLERANCE:.0e} is "
            "rounding",
        },
        {
            "name": "losses_equal_stock",
            "kept": difference <= bound,
            "text": f"stock comparison: losses differ by {difference:.1e}, at most {bound:.1e} is rounding",
        },
    ]


def table(figures: Figures) -> str:
    """Format the figures, one per line."""
    full, lora, compared = figures["full"], figures["lora"], figures["comparison"]
    stock, ours = (_with_interval(compared[f"{side}_tokens_per_s_interval"], ",.0f") for side in ("stock", "fastpack"))
    ratio, difference = _with_interval(compared["ratio_interval"], ".2f"), compared["max_loss_difference"]
    rows = [
        ("full fine-tune", f"loss {_path(_ends(full))}"),
        ("  held-out text", f"loss {_path(full['held_out_loss'])}"),
        ("LoRA", f"loss {_path(_ends(lora))}"),
        ("  held-out text", f"loss {_path(lora['held_out_loss'])}"),
        *lora["facts"].items(),
        ("packing proof", lora["features"]["verify_packing"]["reason"]),
        ("stock", f"{stock} tokens/s: non-padding, median step (interval of the median)"),
        ("fastpack", f"{ours} tokens/s; {ratio} x stock"),
        ("largest loss difference", f"{difference:.1e} (rounding: up to {compared['loss_difference_bound']:.1e})"),
        ("adapter in fresh objects", f"logits differ by {figures['adapter']['max_logit_difference']:.1e}"),
        ("time", f"{figures['seconds']['total']:.0f} s in all"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


def _ends(phase: Figures) -> list[float]:
    return [phase["first_loss"], phase["last_loss"]]


def _with_interval(interval: Figures, style: str) -> str:
    return f"{interval['median']:{style}} ({interval['low']:{style}} to {interval['high']:{style}})"


def _path(losses: Sequence[float]) -> str:
    return " -> ".join(f"{loss:.3f}" for loss in losses)
