"""Packing metadata and mask made in each layer, or once per batch: stock's trainer and attention on both sides.

A third side has the attention kernel for packed rows of this package, which needs no mask at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.arithmetic import metadata_saved
from benchmarks.by_itself_row import Pass, row_of
from benchmarks.step_turns import packed, steps_in_turn
from benchmarks.training_rows import Row, material
from benchmarks.workload import Setting, trainer_arguments
from fastpack_trl.bench.baselines import SideRecipe
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.packing.packed_batch import PackedBatch

REBUILT, ONCE, KERNEL = "in each layer", "once per batch", "kernel for packed rows"
SIDES = (REBUILT, ONCE, KERNEL)
ROWS = {
    "qwen3-14b-qlora": Row("qwen3-14b", 4096, "nf4"),
    "llama-3.2-1b": Row("llama-3.2-1b", 2048, "full"),
    "qwen3-0.6b": Row("qwen3-0.6b", 2048, "full"),
}
TINY = {
    "qwen3-14b-qlora": Row("tiny-qwen3", 256, "nf4"),
    "llama-3.2-1b": Row("tiny-llama", 256, "full"),
    "qwen3-0.6b": Row("tiny-qwen3", 256, "full"),
}
WARMUP, TOLERANCE = 2, 5e-3
_ALONE = 7
"""Rows whose rebuild is timed by itself."""


def measure_row(row: Row, rounds: int, device: str, seed: int, _seconds: float) -> dict[str, Any]:
    """Time training steps of the sides in turn, over one frozen base or the same weights, and one rebuild by itself."""
    given = material(row, device, seed)
    model, packed_rows = given["model"], list[list[int]]()

    def noted(trainer: Any, backend: str) -> Any:
        packed_rows[:] = trainer.train_dataset["seq_lengths"][:_ALONE]
        return packed(trainer, backend)

    recipes = {
        REBUILT: SideRecipe(SFTTrainer, SFTConfig, {}, _rebuilt),
        ONCE: SideRecipe(SFTTrainer, SFTConfig, {}, partial(noted, backend="sdpa")),
        KERNEL: SideRecipe(SFTTrainer, SFTConfig, {}, partial(noted, backend="auto")),
    }
    arguments = trainer_arguments(Setting("", True, True), row.tokens, device, seed)
    found = steps_in_turn(recipes, given, arguments, rounds=rounds, warmup=WARMUP, seed=seed)
    rebuild = rebuild_seconds(packed_rows, device, clock_of(device))
    layers = int(model.config.get_text_config().num_hidden_layers)
    failed = {name: side["failed"] for name, side in found["sides"].items() if "failed" in side}
    return row_of(
        {name: _passes(side) for name, side in found["sides"].items() if name not in failed}, failed, REBUILT, ONCE,
        metadata_saved(layers, rebuild, recomputed=True), {"rebuild_seconds": rebuild, "layers": layers}, TOLERANCE,
    ) | {"other_load": found["other_load"]}  # fmt: skip


@contextlib.contextmanager
def _rebuilt(trainer: Any) -> Iterator[str]:
    with rebuild_per_layer(trainer.model):
        yield REBUILT


def rebuild_seconds(rows: list[list[int]], device: str, clock: Clock) -> float:
    """Return the median seconds of one rebuild of metadata and mask, over packed rows of these document lengths."""
    positions = iter([PackedBatch.from_lengths(row).to(torch.device(device)).position_ids for row in rows * 2])

    def rebuild() -> None:
        _, lengths, _ = metadata_of(next(positions))
        dense_mask_of(lengths, None)

    call: dict[str, Callable[[], None]] = {"rebuild": rebuild}
    found = take_turns(call, rounds=len(rows), warmup=len(rows), clock=clock)
    return median(found.seconds["rebuild"])


def _passes(side: Mapping[str, Any]) -> list[Pass]:
    phases, memory = side["phase_seconds"], side["memory"]
    peak = None if memory is None else memory["peak_bytes"]
    values = (phases["forward"]["values"], phases["backward"]["values"], side["seconds"]["values"], side["losses"])
    return [Pass(*each, peak) for each in zip(*values, strict=True)]
