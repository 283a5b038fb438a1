"""A row of a comparison of trainers, made of what each side has measured; plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from trl.trainer.utils import get_peak_flops

from fastpack_trl.bench.plan import RoundPlan
from fastpack_trl.bench.side import Side
from fastpack_trl.bench.step_watch import PHASES, pairs_of
from fastpack_trl.measure.flops import ModelFlops
from fastpack_trl.measure.intervals import median_interval, ratio_summary, summary

RATES = ("loss", "nonpad", "capacity")


def side_row(result: Mapping[str, Any], timed: slice, flops: ModelFlops | None, peak: float | None) -> dict[str, Any]:
    """Return one side of a row.

    Args:
        result: of `Side.result`.
        timed: which of its steps were timed.
        flops: of the model; None where they cannot be counted.
        peak: operations per second of the device in this dtype; None where unknown.
    """
    steps = result["steps"][timed]
    seconds = [step["seconds"] for step in steps]
    spent = {name: [step["phases"][name] for step in steps] for name in PHASES}
    if not any(spent["captured"]):
        del spent["captured"]
    counts = {name: [step["tokens"][name] for step in steps] for name in RATES}
    rates = {
        name: None
        if None in values
        else median_interval([count / taken for count, taken in zip(values, seconds, strict=True)]).to_dict()
        for name, values in counts.items()
    }
    memory, profile = result["memory"][timed], result["profile"]
    used = max(memory, key=lambda used: used["peak_bytes"]) if memory else None
    busy = profile["busy_seconds"] if profile is not None else None
    return {
        "path": result["path"],
        "checkpointing": result["checkpointing"],
        "seconds": summary(seconds),
        "phases": {name: median(values) for name, values in spent.items()},
        "phase_seconds": {name: summary(values) for name, values in spent.items()},
        "tokens_per_second": rates["capacity"],
        "token_rates": rates,
        **_utilisation(steps, flops, peak),
        "memory": used,
        "memory_marks": result["memory_marks"],
        "idle_share": None if busy is None else max(0.0, 1 - busy / median(seconds)),
        "launches": profile["launches"] if profile is not None else None,
        "host_syncs": result["host_syncs"],
        "profile": profile,
        "losses": [step["loss"] for step in steps],
        "gradient_norms": [step["gradient_norm"] for step in steps],
        "report": result["report"],
        "notes": result["notes"],
    }  # fmt: skip


def _utilisation(
    steps: Sequence[Mapping[str, Any]], flops: ModelFlops | None, peak: float | None
) -> dict[str, float | None]:
    """Return ``mfu`` and ``hfu`` as shares of `peak`, as `ThroughputCallback` counts them; medians over the steps."""
    if flops is None or peak is None:
        return {"mfu": None, "hfu": None}
    model, hardware = [], []
    for step in steps:
        tokens, pairs = step["tokens"], pairs_of(step["tokens"])
        twice = tokens["scored"] - tokens["scored_once"]
        available = step["seconds"] * peak
        model.append(flops.count(tokens["nonpad"], pairs, tokens["scored"]).model / available)
        done = flops.count(tokens["capacity"], pairs, tokens["scored"], twice=twice)
        hardware.append(done.hardware / available)
    return {"mfu": median(model), "hfu": median(hardware)}


def shared_facts(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what both sides of a row share, from one side's steps: documents, tokens and number of micro-batches."""
    lengths = sorted(length for step in steps for length in step["documents"])
    tokens = [count for step in steps for count in step["batch_tokens"]]
    return {
        "tokens": int(median(tokens)),
        "micro_batches": int(median([step["micro_batches"] for step in steps])),
        "documents": {
            "count": len(lengths), "shortest": lengths[0], "median": median(lengths), "longest": lengths[-1],
        },
    }  # fmt: skip


def ratios(seconds: Mapping[str, Sequence[float]], subject: str) -> dict[str, Any]:
    """Return the seconds of each other side / seconds of `subject`, round by round: above 1 the subject is faster."""
    out = {}
    for name, values in seconds.items():
        if name != subject and subject in seconds:
            out[name] = ratio_summary(values, seconds[subject])
    return out


def loss_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """Return the largest relative difference of any side's loss from the first side's, step by step."""
    (_, expected), *others = losses.items()
    worst = [abs(a - b) / abs(b) if b else abs(a) for _, found in others for a, b in zip(found, expected, strict=True)]
    return max(worst, default=0.0)


def setting_of(trainer: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration of a trainer; neither a host's name nor a path."""
    args, model = trainer.args, trainer.model
    config = model.config.get_text_config()
    peft = getattr(model, "peft_config", None) or {}
    lora = next(iter(peft.values()), None)
    adapter = ""
    if lora is not None:
        rank = getattr(lora, "r", None)
        kind = str(getattr(lora.peft_type, "value", lora.peft_type))
        adapter = f"{'LoRA' if kind == 'LORA' else kind}{f' r={rank}' if rank else ''}, "
    quantised = "4-bit " if getattr(model, "is_loaded_in_4bit", False) else ""
    name = f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}"
    parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "model": name,
        "parameters": sum(count for count, _ in parameters),
        "trained_parameters": sum(count for count, trained in parameters if trained),
        "adapter": adapter.rstrip(", ") or None,
        "quantised": bool(quantised),
        "dtype": str(dtype).removeprefix("torch."),
        "checkpointing": "every layer" if args.gradient_checkpointing else "none",
        "batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "packing": bool(args.packing),
        "max_length": args.max_length,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "setting": f"{quantised}{name}, {adapter}{str(dtype).removeprefix('torch.')}, "
        f"{'checkpointing' if args.gradient_checkpointing else 'no checkpointing'}",
    }


def part_of(side: Side, plan: RoundPlan, rounds: int) -> dict[str, Any]:
    """Return one side's part of a row as plain data: of its first `rounds` steps the timed ones."""
    timed = slice(plan.untimed, rounds)
    result = side.result()
    peak = plan.peak_flops or device_peak(side.device, side.dtype)
    return {
        "setting": setting_of(side.trainer, side.dtype),
        "shared": shared_facts(result["steps"][timed]),
        "device": side.device.type,
        "peak_flops": peak,
        "figures": side_row(result, timed, side.flops, peak),
    }


def assemble(parts: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str], subject: str) -> dict[str, Any]:
    """Return a row of what `part_of` made of each side; the first one's setting is that of all."""
    first = next(iter(parts.values()))
    figures = {name: part["figures"] for name, part in parts.items()}
    return {
        **first["setting"],
        **first["shared"],
        "device": first["device"],
        "peak_flops": first["peak_flops"],
        "subject": subject,
        "sides": {**figures, **{name: {"failed": reason} for name, reason in failed.items()}},
        "ratios": ratios({name: side["seconds"]["values"] for name, side in figures.items()}, subject),
        "loss_difference": loss_difference({name: side["losses"] for name, side in figures.items()}),
    }


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the operations per second that TRL knows of a device; None for a CPU, fp32, or another."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak: float | None = get_peak_flops(name, str(dtype).removeprefix("torch."))
    return peak
