"""A row of a comparison of trainers, made of what each side has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from trl.trainer.utils import get_peak_flops

from fastpack_trl.bench.side import Side
from fastpack_trl.bench.step_watch import PHASES, StepFigures
from fastpack_trl.measure.flops import ModelFlops
from fastpack_trl.measure.intervals import median_interval, ratio_summary, summary

RATES = ("loss", "nonpad", "capacity")


def part_of(side: Side, rounds: int) -> dict[str, Any]:
    """Return one side's part of a row as plain data: of its first `rounds` steps the timed ones."""
    steps, memory = side.steps[side.plan.untimed : rounds], side.used[side.plan.untimed : rounds]
    result = side.result()
    dtype = str(side.dtype).removeprefix("torch.")
    device = side.device.type if side.device.type != "cuda" else torch.cuda.get_device_name(side.device)
    peak = side.plan.peak_flops or get_peak_flops(device, dtype)  # None for a CPU, fp32, or a device TRL does not know
    lengths = sorted(length for step in steps for length in step.documents)
    shared = {
        "tokens": int(median(count for step in steps for count in step.batch_tokens)),
        "micro_batches": int(median(step.micro_batches for step in steps)),
        "documents": {
            "count": len(lengths), "shortest": lengths[0], "median": median(lengths), "longest": lengths[-1],
        },
    }  # fmt: skip
    return {
        "setting": setting_of(side.trainer, dtype),
        "shared": {**shared, "device": side.device.type, "peak_flops": peak},
        "figures": {**_figures(steps, memory, side.flops, peak, result["profile"]), **result},
    }


def _figures(
    steps: Sequence[StepFigures],
    memory: Sequence[Mapping[str, int]],
    flops: ModelFlops | None,
    peak: float | None,
    profile: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the figures of the timed steps of a side."""
    seconds = [step.seconds for step in steps]
    spent = {name: [step.phases[name] for step in steps] for name in PHASES}
    if not any(spent["captured"]):
        del spent["captured"]
    rates: dict[str, dict[str, float] | None] = {}
    for name in RATES:
        counts = [step.tokens[name] for step in steps]
        per_second = [n / s for n, s in zip(counts, seconds, strict=True)] if None not in counts else []
        rates[name] = median_interval(per_second).to_dict() if per_second else None
    busy = profile["busy_seconds"] if profile is not None else None
    return {
        "seconds": summary(seconds),
        "phases": {name: median(values) for name, values in spent.items()},
        "phase_seconds": {name: summary(values) for name, values in spent.items()},
        "tokens_per_second": rates["capacity"],
        "token_rates": rates,
        **_utilisation(steps, flops, peak),
        "memory": max(memory, key=lambda used: used["peak_bytes"], default=None),
        "idle_share": None if busy is None else max(0.0, 1 - busy / median(seconds)),
        "launches": profile["launches"] if profile is not None else None,
        "losses": [step.loss for step in steps],
        "gradient_norms": [step.gradient_norm for step in steps],
    }


def _utilisation(steps: Sequence[StepFigures], flops: ModelFlops | None, peak: float | None) -> dict[str, float | None]:
    """Return ``mfu`` and ``hfu`` as shares of `peak`, as `ThroughputCallback` counts them; medians over the steps."""
    if flops is None or peak is None:
        return {"mfu": None, "hfu": None}
    model, hardware = [], []
    for step in steps:
        tokens, available = step.tokens, step.seconds * peak
        pairs, scored = tokens["pairs"], tokens["scored"]
        model.append(flops.count(tokens["nonpad"], pairs, scored).model / available)
        done = flops.count(tokens["capacity"], pairs, scored, twice=scored - tokens["scored_once"])
        hardware.append(done.hardware / available)
    return {"mfu": median(model), "hfu": median(hardware)}


def setting_of(trainer: Any, dtype: str) -> dict[str, Any]:
    """Return the configuration of a trainer; neither a host's name nor a path."""
    args, model = trainer.args, trainer.model
    config = model.config.get_text_config()
    lora = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    adapter = None
    if lora is not None:
        kind = str(getattr(lora.peft_type, "value", lora.peft_type))
        rank = f" r={lora.r}" if getattr(lora, "r", None) else ""
        adapter = f"{'LoRA' if kind == 'LORA' else kind}{rank}"
    quantised = bool(getattr(model, "is_loaded_in_4bit", False))
    name = f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}"
    checkpointing = "checkpointing" if args.gradient_checkpointing else "no checkpointing"
    parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "model": name,
        "parameters": sum(count for count, _ in parameters),
        "trained_parameters": sum(count for count, trained in parameters if trained),
        "adapter": adapter,
        "quantised": quantised,
        "dtype": dtype,
        "checkpointing": "every layer" if args.gradient_checkpointing else "none",
        "batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "packing": bool(args.packing),
        "max_length": args.max_length,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "setting": "4-bit " * quantised + ", ".join(filter(None, (name, adapter, dtype, checkpointing))),
    }


def assemble(parts: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], subject: str) -> dict[str, Any]:
    """Return a row of what `part_of` made of each side; the first one's setting is that of all.

    Its ``ratios`` are seconds of each other side / seconds of `subject`, round by round: above 1 the subject is faster.
    Its ``loss_difference`` is the largest relative one of any side from the first, step by step.
    """
    figures = {name: part["figures"] for name, part in parts.items()}
    first = next(iter(parts))
    seconds = {name: side["seconds"]["values"] for name, side in figures.items()}
    others = [name for name in seconds if name != subject and subject in seconds]
    losses = [zip(side["losses"], figures[first]["losses"], strict=True) for side in figures.values()]
    return {
        **parts[first]["setting"],
        **parts[first]["shared"],
        "subject": subject,
        "sides": {**figures, **{name: {"failed": reason} for name, reason in failed.items()}},
        "ratios": {name: ratio_summary(seconds[name], seconds[subject]) for name in others},
        "loss_difference": max(abs(a - b) / (abs(b) or 1.0) for pairs in losses for a, b in pairs),
    }
