"""Host time of a training step beside its arithmetic: the real loop of both trainers, LoRA, in turn in one process.

The host's clock stands around the calls that are arithmetic: what is left is the host's work between them, the batch
included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from peft import LoraConfig

from benchmarks.case_tables import table
from benchmarks.cases import Run, add_sizes, row_lengths
from benchmarks.command import CaseCommand
from benchmarks.model_shapes import MODELS, ModelShape, build_model, decoder_shape
from benchmarks.step_turns import OURS, PAIR, STOCK, steps_in_turn
from benchmarks.workload import Setting, make_tokenizer, random_documents, trainer_arguments
from fastpack_trl.bench.parity import LossParityError
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.intervals import ratio_summary, summary

DEFAULTS = Run(rounds=56, threads=1, seconds=math.inf)
WARMUP = 2
OVERHEAD = ("data", "other")
"""Phases of a step that are no arithmetic: batches, metrics, loop, callbacks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The training: a model by its shape, LoRA on all linear layers, documents packed into rows.

    Attributes:
        documents: tokens of the shortest and of the longest document, uniform between.
        rows: (tokens of a row, micro-batches of one row per optimizer step).
        bf16: autocast to bf16; fp32 otherwise.
    """

    name: str
    shape: ModelShape
    documents: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    bf16: bool
    rank: int = 16


CPU = Workload(
    "qwen3, 28 layers of 32",
    decoder_shape("qwen3", (28, 32, 96), (4, 2, 8), 512, tied=True, theta=1e4),
    (16, 64),
    ((128, 1), (128, 4)),
    bf16=False,
)  # fmt: skip
CUDA = Workload("qwen3-0.6b", MODELS["qwen3-0.6b"], (64, 512), ((1024, 1), (2048, 1), (1024, 8)), bf16=True)


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, workload: Workload | None = None
) -> dict[str, Any]:
    """Time steps of stock's `train` and of ours in turn, and what lies outside of the arithmetic.

    Both train the same weights with LoRA on the same rows. A step lasts from the end of one to the end of the next, and
    has forward, backward, the optimizer (with clipping, the schedule and the gradients set to None), and everything
    else, the batch included: the *overhead*.

    Args:
        run: a round is a step per side. On CUDA the shape of Qwen3-0.6B in bf16 autocast.

    Returns:
        A record. A row is one of `steps_in_turn`; its sides have ``overhead_seconds`` too, and its ``overhead`` is our
        overhead / stock's, step by step.

    Raises:
        UserError: a row shorter than the longest document.
        LossParityError: the losses differ.
    """
    work = workload or (CUDA if run.device == "cuda" else CPU)
    lengths = row_lengths(tokens, [length for length, _ in work.rows], work.documents[1])
    tasks = [
        RowTask(
            {"setting": _setting(work, micro_batches), "tokens": length, "micro_batches": micro_batches},
            partial(_measure_row, run, work, length, micro_batches),
        )
        for length, micro_batches in (((length, 1) for length in lengths) if tokens else work.rows)
    ]
    settings = {
        "model": work.name,
        "shape": {"model_type": work.shape.model_type, **work.shape.fields},
        "documents": {"shortest": work.documents[0], "longest": work.documents[1], "distribution": "uniform"},
        "bf16": work.bf16,
        "lora_rank": work.rank,
        "pairs": run.rounds,
        "warmup_steps": WARMUP,
    }
    return run.record("host_overhead", tasks, settings, loud=(LossParityError,))


def _setting(work: Workload, ga: int) -> str:
    return f"{work.name}, LoRA, {'bf16' if work.bf16 else 'fp32'}, {ga} micro-batch{'es' * (ga > 1)} per step"


def _measure_row(run: Run, work: Workload, tokens: int, ga: int, _seconds: float) -> dict[str, Any]:
    vocabulary = int(work.shape.fields["vocab_size"])
    given = {
        "model": build_model(work.shape, positions=tokens, seed=run.seed, device=run.device),
        "processing_class": make_tokenizer(vocabulary),
        "train_dataset": random_documents(
            *work.documents, vocabulary, tokens * ga * (run.rounds + 2 * WARMUP), run.seed
        ),
        "peft_config": LoraConfig(target_modules="all-linear", r=work.rank, lora_dropout=0.0),
    }
    arguments = trainer_arguments(Setting("", work.bf16, False), tokens, run.device, run.seed)
    arguments |= {"gradient_accumulation_steps": ga, "logging_strategy": "no"}
    row = steps_in_turn(PAIR, given, arguments, rounds=run.rounds, warmup=WARMUP, seed=run.seed, host_clock=True)
    overheads = {name: _overhead(row["sides"][name]) for name in (STOCK, OURS)}
    for name, seconds in overheads.items():
        row["sides"][name]["overhead_seconds"] = summary(seconds)
    return row | {"overhead": ratio_summary(overheads[OURS], overheads[STOCK])}


def _overhead(side: Mapping[str, Any]) -> list[float]:
    phases = [side["phase_seconds"][phase]["values"] for phase in OVERHEAD]
    return [sum(parts) for parts in zip(*phases, strict=True)]


COMMAND = CaseCommand(
    case="host_overhead", help=__doc__, rounds=DEFAULTS.rounds, seconds=DEFAULTS.seconds, table=table,
    record=lambda args, file: measure(Run.of(args, file), tokens=args.tokens),
    more=partial(add_sizes, threads=1),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
