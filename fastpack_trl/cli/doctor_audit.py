"""Host waits in a few steps of a config, under TRL and under fastpack: operation, line and count."""

from __future__ import annotations

import io
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fastpack_trl.errors import UserError, preparing
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.host_syncs import HostSyncs, count_host_syncs
from fastpack_trl.measure.tables import aligned

_WARM_UP = 2  # optimizer steps: states are made, kernels are chosen, the loader fills
_ROOTS = (Path(sysconfig.get_path("purelib")).resolve(), Path(__file__).resolve().parents[2], Path.cwd())
_SHOWN = 70  # characters of a source line
_KINDS = ("sync", "copy", "host")


class _Window(TrainerCallback):
    """Host waits from the end of one optimizer step to the end of a later one, with fetching, logging and callbacks."""

    def __init__(self, steps: int) -> None:
        self.last = _WARM_UP + steps
        self.syncs: HostSyncs | None = None
        self.is_complete = False
        self.stack = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == _WARM_UP:
            self.syncs = self.stack.enter_context(count_host_syncs(device=args.device))
        elif state.global_step == self.last:
            self.stack.close()
            self.is_complete = True


def audit(config: str, folder: str, steps: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Train ``2 + steps`` optimizer steps of a YAML with TRL's trainer, then with ours; count in the last `steps`.

    Returns:
        ``{"steps", "micro_batches_per_step", "backend", "sides": {"stock" | "fastpack": {"error", "total", "entries"}},
        "calls": [...]}`` with one of ``calls`` per call site: both sides' counts per optimizer step. A side that failed
        has its message under ``error``; the other side is there all the same.
    """
    figures: dict[str, Any] = {"steps": steps, "micro_batches_per_step": None, "backend": None, "sides": {}}
    for side in ("stock", "fastpack"):
        figures["sides"][side] = _count(side, config, folder, steps, flags, figures)
        free_memory("cuda" if torch.cuda.is_available() else "cpu")  # of this side's model, for the next one's
    calls: dict[tuple[Any, ...], dict[str, Any]] = {}
    for side, facts in figures["sides"].items():
        for entry in facts["entries"]:
            call = {name: entry[name] for name in ("file", "line", "op", "kind", "code")}
            key = (entry["file"], entry["line"], entry["op"], entry["kind"])
            calls.setdefault(key, call | dict.fromkeys(figures["sides"], 0.0))[side] = entry["per_step"]

    def order(call: dict[str, Any]) -> tuple[Any, ...]:
        return _KINDS.index(call["kind"]), -call["stock"], call["file"], call["line"]

    return figures | {"calls": sorted(calls.values(), key=order)}


def _count(side: str, config: str, folder: str, steps: int, flags: Sequence[str], figures: dict[str, Any]) -> Any:
    from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments

    window = _Window(steps)
    with redirect_stdout(io.StringIO()):  # the banner and the log of either side
        arguments = short_run_arguments(config, folder, *flags, "--max_steps", str(window.last))
        figures["micro_batches_per_step"] = arguments.training.gradient_accumulation_steps
        with preparing():
            trainer = make_trainer(arguments, [window], arguments.method.of_trl[0] if side == "stock" else None)
        with window.stack:
            _, error = attempt(trainer.train, loud=(UserError,))
    if error is None and not window.is_complete:
        error = f"training ended after {trainer.state.global_step} of {window.last} steps"
    if window.syncs is None or not window.is_complete:
        return {"error": error, "total": None, "entries": []}
    counted = window.syncs.to_dict()
    figures["backend"] = counted["backend"]
    entries = [
        entry | {"file": _short(entry["file"]), "per_step": entry["count"] / steps} for entry in counted["entries"]
    ]
    return {"error": error, "total": counted["total"] / steps, "entries": entries}


def _short(file: str) -> str:
    """Shorten a path: ``".../site-packages/trl/trainer/sft_trainer.py"`` -> ``"trl/trainer/sft_trainer.py"``."""
    path = Path(file).resolve()
    return next((str(path.relative_to(root)) for root in _ROOTS if path.is_relative_to(root)), str(path))


def table(figures: Mapping[str, Any]) -> str:
    """Format the audit: one row per call site that waits, the totals, and what they leave out."""
    sides = figures["sides"]

    def cells(values: Mapping[str, float]) -> list[str]:
        return ["failed" if facts["total"] is None else f"{values[side]:g}" for side, facts in sides.items()]

    rows = [["call site", "operation", "kind", *sides, "code"]]
    for call in figures["calls"]:
        if call["kind"] != "host":
            place = f"{call['file']}:{call['line']}"
            rows.append([place, call["op"], call["kind"], *cells(call), call["code"][:_SHOWN]])
    rows.append(["total", "", "", *cells({side: facts["total"] for side, facts in sides.items()}), ""])
    how = "torch's sync debug mode" if figures["backend"] == "cuda" else "operations that would wait on CUDA"
    of_step = f"{figures['micro_batches_per_step']} micro-batches; mean of {figures['steps']} steps; {how}"
    lines = [f"host waits per optimizer step ({of_step})", *aligned(rows)]
    hosts = {side: sum(call[side] for call in figures["calls"] if call["kind"] == "host") for side in sides}
    if any(hosts.values()):
        counts = ", ".join(f"{side} {count}" for side, count in zip(sides, cells(hosts), strict=True))
        lines.append(f"not counted: reads of tensors that stay on the host (collator, optimizer counters): {counts}")
    return "\n".join(lines)
