"""One side of a row: its trainer at its defaults, trained and watched in this process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.training_rows import Row, material
from fastpack_trl.bench.run_watch import RunWatch
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.payback import LONG_RUN

OURS, OURS_FP8, SAME_MEMORY = "fastpack", "fastpack, base in FP8", "fastpack (same memory)"
EAGER = "fastpack, eager"
"""No step is replayed as a CUDA graph."""
COMMON = {
    "max_steps": LONG_RUN, "learning_rate": 1e-4, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Arguments of every side."""


@dataclass(frozen=True, slots=True)
class Side:
    """One trainer: fields beside the row's, and what is around its training."""

    ours: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    """Decoder layers compiled one by one, by accelerate."""


SIDES = {
    "stock": Side(),
    "stock compiled": Side(compiled=True),
    "stock compiled, all kept": Side(fields={"gradient_checkpointing": False}, compiled=True),
    "stock + Liger": Side(fields={"use_liger_kernel": True}),
    SAME_MEMORY: Side(True, {"activation_memory": "checkpoint"}),
    OURS: Side(True),
    EAGER: Side(True, {"cuda_graph": "off"}),
    OURS_FP8: Side(True, {"frozen_base": "fp8"}),
}


def device_here() -> str:
    """Return ``cuda`` where torch sees a device, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def train_side(
    row: Row, side: Side, seed: int, watched: Mapping[str, Any], *,
    made: Callable[[Any], None] = lambda trainer: None, **fields: Any,
) -> tuple[Any, RunWatch]:  # fmt: skip
    """Train one side of a row in this process; return its trainer and the watch of its steps, which ends the run.

    Args:
        watched: arguments of `RunWatch`; the warm-up of a side of ours lasts until all is decided.
        made: called with the trainer right before it trains.
    """
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl import FastSFTConfig, FastSFTTrainer
    from fastpack_trl.bench.baselines import compiled_regions

    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    device = device_here()
    kinds: tuple[Any, Any] = (FastSFTTrainer, FastSFTConfig) if side.ours else (SFTTrainer, SFTConfig)
    given = material(row, device, seed)
    trainer: Any = None
    watch = RunWatch(ready=lambda: not side.ours or decided(trainer.fastpack_report.to_dict()), **watched)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        args = kinds[1](
            output_dir=folder, seed=seed, use_cpu=device != "cuda",
            **(COMMON | row.precision(device) | row.arguments | dict(side.fields) | fields),
        )  # fmt: skip
        trainer = kinds[0](args=args, callbacks=[watch], **given)
        if side.compiled:
            stack.enter_context(compiled_regions(trainer))
        free_memory(device)
        made(trainer)
        watch.begin()
        trainer.train()
    return trainer, watch


def decided(report: Mapping[str, Any]) -> bool:
    """Return whether no feature of a report still waits for the steps in which it decides."""
    return not any("pending" in str(feature["path"]) for feature in report["features"].values())
