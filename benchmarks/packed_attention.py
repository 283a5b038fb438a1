"""The whole training step of `FastSFTTrainer` beside that of stock `trl.SFTTrainer` with sdpa, on the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.cases import Run, row_lengths
from benchmarks.model_shapes import build_model
from benchmarks.step_turns import GATE_STEPS, PAIR, steps_in_turn
from benchmarks.workload import (
    CPU,
    CUDA,
    SPARE_ROWS,
    TRL_DEFAULTS,
    Setting,
    Workload,
    make_tokenizer,
    random_documents,
    trainer_arguments,
)
from fastpack_trl.bench.parity import LossParityError
from fastpack_trl.bench.result_file import RowTask

DEFAULTS = Run(rounds=5, seconds=math.inf)
WARMUP_PAIRS = 1


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, quick: bool = False, workload: Workload | None = None
) -> dict[str, Any]:
    """Time training steps of both trainers in turn and say by how much ours is faster.

    Both sides start from the same weights and see the same rows, packed by TRL. Per row length: one step each whose
    losses must agree, one pair to warm up, then the rounds in alternating order.

    Args:
        run: 6 rounds give an interval of 95 %. On CUDA larger shapes are trained, in bf16.
        tokens: row lengths (``max_length``); by default 256 to 8192 on the CPU, 4096 to 32768 on CUDA.
        quick: under TRL's defaults only the few row lengths of the workload's `quick_tokens`.

    Returns:
        A record; its rows are those of `steps_in_turn`.

    Raises:
        UserError: a row length below the longest document.
        LossParityError: the losses differ, or the two sides were given different rows.
    """
    work = workload or (CUDA if run.device == "cuda" else CPU)
    tasks = [
        RowTask(
            {"setting": setting.name, "gradient_checkpointing": setting.gradient_checkpointing, "tokens": length},
            partial(_measure_row, run, work, setting, length),
        )
        for setting in work.settings
        for length in row_lengths(tokens, work.tokens, work.longest)
        if not (quick and setting == TRL_DEFAULTS and length not in work.quick_tokens)
    ]
    settings = {
        **asdict(work.shape),
        "model": "qwen3",
        "documents": {"shortest": work.shortest, "longest": work.longest, "distribution": "uniform"},
        "batch_size": 1,
        "pairs": run.rounds,
        "warmup_steps": GATE_STEPS + WARMUP_PAIRS,
        "stock": "trl.SFTTrainer, attn_implementation=sdpa",
    }
    return run.record("packed_attention", tasks, settings, apart={"quick": quick}, loud=(LossParityError,))


def _measure_row(run: Run, work: Workload, setting: Setting, tokens: int, _seconds: float) -> dict[str, Any]:
    vocabulary = work.shape.vocabulary
    rows = GATE_STEPS + WARMUP_PAIRS + run.rounds + SPARE_ROWS + 2  # the last step counts syncs
    given = {
        "model": build_model(work.shape.public, positions=tokens, seed=run.seed, device="cpu"),
        "processing_class": make_tokenizer(vocabulary),
        "train_dataset": random_documents(work.shortest, work.longest, vocabulary, tokens * rows, run.seed),
    }
    arguments = trainer_arguments(setting, tokens, run.device, run.seed)
    return steps_in_turn(PAIR, given, arguments, rounds=run.rounds, warmup=WARMUP_PAIRS, seed=run.seed)
