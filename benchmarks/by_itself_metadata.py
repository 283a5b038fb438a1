"""Packing metadata and mask made in each layer, or once per batch: stock's trainer and attention on both sides.

A third side has the attention kernel for packed rows of this package, which needs no mask at all.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.arithmetic import metadata_saved
from benchmarks.by_itself_row import Pass, row_of
from benchmarks.lora_models import shared_copy
from benchmarks.model_shapes import PAD
from benchmarks.steps import Step, SteppedTrainer, measure_in_turns
from benchmarks.training_rows import Row, material
from benchmarks.workload import Setting, trainer_arguments, without_emptiest
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.packing.collator import PackingCollator
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


def measure_row(row: Row, rounds: int, device: str, seed: int, seconds: float) -> dict[str, Any]:
    """Time training steps of the sides in turn, over one set of weights, and one rebuild by itself."""
    start = time.perf_counter()
    clock = clock_of(device)
    steps = WARMUP + rounds + 1
    given = material(row, device, seed)
    model = given["model"]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        arguments = trainer_arguments(Setting("", True, True), row.tokens, steps, device, seed, folder)
        arguments |= {"learning_rate": 1e-6}  # the sides train the same weights in turn: their losses stay comparable

        def make(name: str, first: SteppedTrainer | None) -> SteppedTrainer:
            trainer = SFTTrainer(
                shared_copy(model), args=SFTConfig(**arguments), train_dataset=given["train_dataset"],
                processing_class=given["processing_class"],
            )  # fmt: skip
            trainer.train_dataset = without_emptiest(trainer.train_dataset)
            if name == REBUILT:
                stack.enter_context(rebuild_per_layer(trainer.model))
            else:
                trainer.data_collator = PackingCollator(pad_token_id=PAD)
                backend = "sdpa" if name == ONCE else "auto"
                stack.enter_context(packed_attention(trainer.model, backend, compute_dtype=torch.bfloat16))
            if first is not None:
                trainer.optimizer = first.optimizer.optimizer
            return SteppedTrainer(trainer, clock, steps)

        turns = measure_in_turns(
            SIDES, make, weights=model, device=device, rounds=rounds, warmup=WARMUP,
            seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
        packed = [row for side in turns.sides.values() for row in side.trainer.train_dataset["seq_lengths"][:_ALONE]]
        rebuild = rebuild_seconds(packed[:_ALONE], device, clock)
        layers = int(model.config.get_text_config().num_hidden_layers)
        passes = {
            name: [_pass(step, memory, clock) for step, memory in found] for name, found in turns.found.results.items()
        }
        return row_of(
            passes, turns.failed, REBUILT, ONCE, metadata_saved(layers, rebuild, recomputed=True),
            {"rebuild_seconds": rebuild, "layers": layers}, TOLERANCE,
        ) | {"other_load": turns.other_load}  # fmt: skip


def rebuild_seconds(rows: list[list[int]], device: str, clock: Clock) -> float:
    """Return the median seconds of one rebuild of metadata and mask, over packed rows of these document lengths."""
    positions = iter([PackedBatch.from_lengths(row).to(torch.device(device)).position_ids for row in rows * 2])

    def rebuild() -> None:
        _, lengths, _ = metadata_of(next(positions))
        dense_mask_of(lengths, None)

    call: dict[str, Callable[[], None]] = {"rebuild": rebuild}
    found = take_turns(call, rounds=len(rows), warmup=len(rows), clock=clock)
    return median(found.seconds["rebuild"])


def _pass(step: Step, memory: dict[str, int] | None, clock: Clock) -> Pass:
    _, data, forward, backward, end = step.marks
    peak = None if memory is None else memory["peak_bytes"]
    return Pass(
        clock.seconds(data, forward), clock.seconds(forward, backward), clock.seconds(step.marks[0], end),
        float(step.loss), peak,
    )  # fmt: skip
