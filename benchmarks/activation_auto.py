"""Whole trainers: `activation_memory` at its default beside stock with and without checkpointing."""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

from trl import SFTConfig, SFTTrainer

from benchmarks.lora import LOSS_TOLERANCE, _installed
from benchmarks.lora_models import LoraModel, build, definitions
from benchmarks.model_shapes import PAD
from benchmarks.model_steps import shared_copy
from benchmarks.side_turns import largest_memory, measure_in_turns
from benchmarks.steps import Step, SteppedTrainer, side_figures
from benchmarks.workload import OURS, SPARE_ROWS, STOCK, Setting, trainer_arguments, without_emptiest
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.measure.rounds import Rounds
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.trainer import FastSFTTrainer

STOCK_KEEP = "stock_no_checkpointing"
SIDES = (STOCK, STOCK_KEEP, OURS)
WARMUP, LEAST_ROUNDS = 4, 3


def measure_auto(
    model: LoraModel, layers: int | None, tokens: int, rounds: int, seconds: float, device: str, seed: int
) -> dict[str, Any]:
    """Time training steps of three trainers in turn, on the same packed rows of real text.

    ``stock``: `trl.SFTTrainer` as configured by default, with checkpointing, but with this package's attention.
    ``stock_no_checkpointing``: the same with ``gradient_checkpointing=False``. ``fastpack``: every field at its default
    (on the CPU with a budget, without which the plan is off there).

    Returns:
        A row without its labels: ``sides``, ``ratios`` and ``plan``, the line of the report.
    """
    start = time.perf_counter()
    clock = clock_of(device)
    steps = WARMUP + rounds
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        weights = build(model, layers=layers, positions=tokens, seed=seed, device=device)
        vocabulary = int(weights.get_base_model().config.vocab_size)
        tokenizer, documents = definitions(tokens * (steps + SPARE_ROWS + 1), vocabulary, tokens)
        paths: dict[str, str] = {}

        def make(name: str, first: SteppedTrainer | None) -> SteppedTrainer:
            arguments = trainer_arguments(Setting("", True, name != STOCK_KEEP), tokens, steps, device, seed, folder)
            arguments |= {"learning_rate": 1e-6}  # the sides train the same weights in turn
            copied = shared_copy(weights)
            if name == OURS:
                budget = None if device == "cuda" else 4.0
                args = FastSFTConfig(**arguments, activation_memory_gib=budget)
                trainer: Any = FastSFTTrainer(copied, args=args, train_dataset=documents, processing_class=tokenizer)
            else:
                trainer = SFTTrainer(
                    copied, args=SFTConfig(**arguments), train_dataset=documents, processing_class=tokenizer
                )
                trainer.data_collator = PackingCollator(pad_token_id=PAD)
            trainer.train_dataset = without_emptiest(trainer.train_dataset)
            if first is not None:
                trainer.optimizer = first.optimizer.optimizer
            paths[name] = stack.enter_context(_installed(name if name == OURS else STOCK, trainer))
            return SteppedTrainer(trainer, clock, steps)

        turns = measure_in_turns(
            SIDES, make, weights=weights, device=device, rounds=rounds, warmup=WARMUP, least=LEAST_ROUNDS,
            seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
        sides, found, failed = turns.sides, turns.found, turns.failed
        if OURS in sides:  # some of what runs is decided in the first step
            report = sides[OURS].trainer.fastpack_report
            paths[OURS] = ", ".join(f"{line.feature} {line.path}" for line in report if line.status == "on")
        figures = {
            name: {"failed": failed[name]} if name in failed else _figures(found, name, paths[name], clock)
            for name in SIDES
        }
        line = sides[OURS].trainer.fastpack_report["activation_memory"] if OURS in sides else None
        return {
            "sides": figures,
            "ratios": {name: found.ratio(name, OURS) for name in found.seconds if name != OURS}
            if OURS in found.seconds
            else {},
            "plan": None if line is None else str(line),
            "loss_tolerance": LOSS_TOLERANCE,
            "order": found.order,
            "other_load": turns.other_load,
        }


def _figures(found: Rounds[tuple[Step, Any]], name: str, path: str, clock: Clock) -> dict[str, Any]:
    steps = [step for step, _ in found.results[name]]
    return {
        "path": path,
        **side_figures(found.seconds[name], steps, clock),
        "memory": largest_memory(found.results[name]),
    }
