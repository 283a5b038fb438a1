"""A row of a comparison of trainers, made of what each side has measured, and its gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from trl.trainer.utils import get_peak_flops

from fastpack_trl.bench.parity import LossParityError, check_step, tolerance
from fastpack_trl.bench.side import RoundPlan, Side
from fastpack_trl.bench.step_watch import PHASES, StepFigures
from fastpack_trl.measure.flops import ModelFlops
from fastpack_trl.measure.intervals import median_interval, ratio_summary, summary

RATES = ("loss", "nonpad", "capacity")


def part_of(side: Side, rounds: int, dropout: bool) -> dict[str, Any]:
    """Return one side's part of a row as plain data: of its first `rounds` steps the timed ones; and what was checked.

    Args:
        side: all of whose steps have run.
        rounds: that all sides of the row have.
        dropout: whether the gate had to switch some off.
    """
    steps, trainer = side.steps[side.plan.untimed : rounds], side.trainer
    device = side.device.type if side.device.type != "cuda" else torch.cuda.get_device_name(side.device)
    # None for a CPU, fp32, or a device that TRL does not know.
    peak = side.plan.peak_flops or get_peak_flops(device, side.dtype)
    lengths = sorted(length for step in steps for length in step.documents)
    report, path = getattr(trainer, "fastpack_report", None), side.path
    if report is not None:
        path = ", ".join(f"{line.feature} {line.path}" for line in report if line.status == "on") or "all off"
    return {
        "setting": setting_of(trainer, side.dtype),
        "shared": {
            "tokens": int(median([count for step in steps for count in step.batch_tokens] or [0])),
            "micro_batches": int(median(step.micro_batches for step in steps)),
            "documents": {
                "count": len(lengths), "shortest": lengths[0], "median": median(lengths), "longest": lengths[-1],
            } if lengths else {"count": 0},
            "device": side.device.type,
            "peak_flops": peak,
            "made_up": side.recipe.made_up,
        },
        "figures": {
            **_figures(steps, side.flops, peak, side.extras["profile"]),
            "path": path,
            "report": None if report is None else report.to_dict(),
            "checkpointing": _checkpointing(trainer, report),
            **side.extras,
        },
        "steps": [side.compared(step) for step in side.steps],
        "dropout": dropout,
        "figure": side.recipe.compares,
    }  # fmt: skip


def _checkpointing(trainer: Any, report: Any) -> str:
    """Return what is recomputed: ``every layer``, ``none``, or the plan."""
    args = trainer.args
    if report is not None and "activation_memory" in report and report["activation_memory"].status == "on":
        return f"planned: {report['activation_memory'].path}"
    text = "every layer" if args.gradient_checkpointing else "none"
    return f"{text}, activations offloaded" if getattr(args, "activation_offloading", False) else text


def _figures(
    steps: Sequence[StepFigures], flops: ModelFlops | None, peak: float | None, profile: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the figures of the timed steps of a side."""
    seconds = [step.seconds for step in steps]
    spent = {name: [step.phases[name] for step in steps] for name in PHASES}
    if not any(spent["captured"]):
        del spent["captured"]
    rates: dict[str, dict[str, float] | None] = {}
    for name in RATES:
        # What lies in a row once counts for each document that has it.
        spared = [step.tokens["spared"] if name == "capacity" else 0 for step in steps]
        counts = [step.tokens[name] for step in steps]
        counts = counts if None in counts else [sum(pair) for pair in zip(counts, spared, strict=True)]
        per_second = [n / s for n, s in zip(counts, seconds, strict=True)] if None not in counts else []
        rates[name] = median_interval(per_second).to_dict() if per_second else None
    busy = None if profile is None else profile["busy_seconds"]
    return {
        "seconds": summary(seconds),
        "phases": {name: median(values) for name, values in spent.items()},
        "phase_seconds": {name: summary(values) for name, values in spent.items()},
        "tokens_per_second": rates["capacity"],
        "token_rates": rates,
        "computed": sum(step.tokens["nonpad"] - step.tokens["spared"] for step in steps)
        / max(1, sum(step.tokens["nonpad"] for step in steps)),
        **_utilisation(steps, flops, peak),
        "memory": max((step.memory for step in steps if step.memory), key=lambda m: m["peak_bytes"], default=None),
        "idle_share": None if busy is None else max(0.0, 1 - busy / median(seconds)),
        "launches": None if profile is None else profile["launches"],
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
        model.append(flops.count(tokens["nonpad"] - tokens["spared"], pairs, scored).model / available)
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
        "packing": bool(getattr(args, "packing", False)),
        "max_length": getattr(args, "max_length", None),
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "setting": "4-bit " * quantised + ", ".join(filter(None, (name, adapter, dtype, checkpointing))),
    }


def disagreement(
    step: int, found: Mapping[str, tuple[str, float]], plan: RoundPlan, *, dtype: str, dropout: bool, figure: str,
    subject: str,
) -> str:  # fmt: skip
    """Return where the last side of `found` computes something else than the first; empty if nowhere.

    Args:
        step, found: see `check_step`.
        plan: in how many steps losses are compared.
        dtype, dropout, figure: of the first side.
        subject: a side of which it is raised.

    Raises:
        LossParityError: the side is the subject.
    """
    try:
        check_step(step, found, getattr(torch, dtype) if step <= plan.checked(dropout) else None, figure)
    except LossParityError as error:
        if list(found)[-1] == subject:
            raise
        return str(error)
    return ""


def assemble(
    parts: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], subject: str, plan: RoundPlan, **more: Any
) -> dict[str, Any]:
    """Return a row of what `part_of` made of each side; the first one's setting is that of all.

    Its ``ratios`` are seconds of each other side / seconds of `subject`, round by round: above 1 the subject is faster.
    Its ``loss_difference`` is the largest relative one of any side from the first, step by step, of losses or of the
    ``figure`` of its ``gate``, which has those of the steps in which they had to agree; None if there was no gate.
    """
    figures = {name: part["figures"] for name, part in parts.items()}
    first = next(iter(parts))
    seconds = {name: side["seconds"]["values"] for name, side in figures.items()}
    others = [name for name in seconds if name != subject and subject in seconds]
    compared = [[value for _, value in part["steps"][plan.untimed :]] for part in parts.values()]
    dtype, dropout, figure = parts[first]["setting"]["dtype"], parts[first]["dropout"], parts[first]["figure"]
    gate = {
        "dtype": dtype,
        "figure": figure,
        "tolerance": tolerance(getattr(torch, dtype), figure),
        "steps": [
            {name: part["steps"][index][1] for name, part in parts.items()} for index in range(plan.checked(dropout))
        ],
        "dropout": "off in these steps" if dropout else "none",
    }
    return {
        **parts[first]["setting"],
        **parts[first]["shared"],
        "subject": subject,
        "sides": {**figures, **{name: {"failed": reason} for name, reason in failed.items()}},
        "ratios": {name: ratio_summary(seconds[name], seconds[subject]) for name in others},
        "loss_difference": max(
            abs(a - b) / (abs(b) or 1.0) for own in compared for a, b in zip(own, compared[0], strict=False)
        ),
        "gate": gate if len(parts) > 1 and plan.gate_steps else None,
        **more,
    }
