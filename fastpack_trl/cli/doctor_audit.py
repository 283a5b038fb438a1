"""Host waits in a few steps of a config, with stock and with fastpack: operation, line and count."""

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
_LIBRARIES = str(Path(sysconfig.get_path("purelib")).resolve())
_SHOWN = 70  # characters of a source line


class _Window(TrainerCallback):
    """Host waits from the end of one optimizer step to the end of a later one, with fetching, logging and callbacks."""

    def __init__(self, steps: int) -> None:
        self.first, self.last = _WARM_UP, _WARM_UP + steps
        self.syncs: HostSyncs | None = None
        self.complete = False
        self._stack = ExitStack()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.first:
            self.syncs = self._stack.enter_context(count_host_syncs(device=args.device))
        elif state.global_step == self.last:
            self.close()
            self.complete = True

    def close(self) -> None:
        self._stack.close()


def audit(config: str, folder: str, steps: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Train ``2 + steps`` optimizer steps of a YAML with stock's trainer, then with ours; count in the last `steps`.

    Returns:
        ``{"steps", "micro_batches_per_step", "backend", "sides": {"stock" | "fastpack": {"error", "total", "entries"}},
        "calls": [...]}`` with one of ``calls`` per call site: both sides' counts per optimizer step. A side that failed
        has its message under ``error``; the other side is there all the same.
    """
    figures: dict[str, Any] = {"steps": steps, "micro_batches_per_step": None, "backend": None, "sides": {}}
    for side in ("stock", "fastpack"):
        figures["sides"][side] = _side(side, config, folder, steps, flags, figures)
        free_memory("cuda" if torch.cuda.is_available() else "cpu")  # of this side's model, for the next one's
    figures["calls"] = _calls(figures["sides"])
    return figures


def _side(side: str, config: str, folder: str, steps: int, flags: Sequence[str], figures: dict[str, Any]) -> Any:
    from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments

    window = _Window(steps)
    out: dict[str, Any] = {"error": None, "total": None, "entries": []}
    with redirect_stdout(io.StringIO()):  # the banner and the log of either side
        arguments = short_run_arguments(config, folder, *flags, "--max_steps", str(window.last))
        figures["micro_batches_per_step"] = arguments.training.gradient_accumulation_steps
        with preparing():
            trainer = make_trainer(arguments, [window], arguments.method.of_trl[0] if side == "stock" else None)
        try:
            _, out["error"] = attempt(trainer.train, loud=(UserError,))
        finally:
            window.close()
    if out["error"] is None and not window.complete:
        out["error"] = f"training ended after {trainer.state.global_step} of {window.last} steps"
    if window.syncs is not None and window.complete:
        figures["backend"] = window.syncs.backend
        out["total"] = window.syncs.total / steps
        for entry in window.syncs.to_dict()["entries"]:
            count = entry.pop("count")
            out["entries"].append({**entry, "file": _short(entry["file"]), "count": count, "per_step": count / steps})
    return out


def _short(file: str) -> str:
    """Shorten a path: ``".../site-packages/trl/trainer/sft_trainer.py"`` -> ``"trl/trainer/sft_trainer.py"``."""
    path = Path(file).resolve()
    roots = (_LIBRARIES, Path(__file__).resolve().parents[2], Path.cwd())
    return next((str(path.relative_to(root)) for root in roots if path.is_relative_to(root)), str(path))


def _calls(sides: Mapping[str, Any]) -> list[dict[str, Any]]:
    merged: dict[tuple[str, int, str, str], dict[str, Any]] = {}
    for side, facts in sides.items():
        for entry in facts["entries"]:
            call = {name: entry[name] for name in ("file", "line", "op", "kind", "code")}
            key = (entry["file"], entry["line"], entry["op"], entry["kind"])
            merged.setdefault(key, call | dict.fromkeys(sides, 0.0))[side] = entry["per_step"]
    order = {"sync": 0, "copy": 1, "host": 2}
    return sorted(merged.values(), key=lambda call: (order[call["kind"]], -call["stock"], call["file"], call["line"]))


def table(figures: Mapping[str, Any]) -> str:
    """Format the audit: one row per call site that waits, the totals, and what they leave out."""
    sides = figures["sides"]

    def cells(values: Mapping[str, float]) -> list[str]:
        return ["failed" if facts["total"] is None else f"{values[side]:g}" for side, facts in sides.items()]

    how = "torch's sync debug mode" if figures["backend"] == "cuda" else "operations that would wait on CUDA"
    rows = [["call site", "operation", "kind", *sides, "code"]]
    hosts = dict.fromkeys(sides, 0.0)
    for call in figures["calls"]:
        if call["kind"] == "host":
            hosts = {side: hosts[side] + call[side] for side in sides}
            continue
        place = f"{call['file']}:{call['line']}"
        rows.append([place, call["op"], call["kind"], *cells(call), call["code"][:_SHOWN]])
    rows.append(["total", "", "", *cells({side: facts["total"] or 0.0 for side, facts in sides.items()}), ""])
    of_step = f"{figures['micro_batches_per_step']} micro-batches; mean of {figures['steps']} steps; {how}"
    out = [f"host waits per optimizer step ({of_step})", *aligned(rows)]
    if any(hosts.values()):
        counts = ", ".join(f"{side} {count}" for side, count in zip(sides, cells(hosts), strict=True))
        out.append(f"not counted: reads of tensors that stay on the host (collator, optimizer counters): {counts}")
    return "\n".join(out)
