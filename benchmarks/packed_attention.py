"""The whole training step of `FastSFTTrainer` beside that of stock `trl.SFTTrainer` with sdpa, on the same rows."""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.steps import Step, SteppedTrainer, side_figures
from benchmarks.workload import CPU, CUDA, OURS, PLAIN, STOCK, TRL_DEFAULTS, Setting, Workload, make_trainers
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import clock_of

CASE = "packed_attention"

DEFAULT_PAIRS, DEFAULT_THREADS = 5, 2
GATE_STEPS, WARMUP_PAIRS = 1, 1

FLOOR = 0.97
TARGETS = {4096: 3.0, 8192: 4.5}
"""Least speed-up of a row length on the CPU in fp32 without checkpointing; `FLOOR` for every other length."""

FLOAT32_PARITY = 1e-5
# In bf16 each side rounds each token's logits, which are of order 1 with random weights: a token's loss is off by about
# one unit roundoff, and the mean over n independent tokens by that over sqrt(n). The bound is four standard errors of
# the difference of two such means. Documents that see their neighbours move each token's loss by tens of units.
BF16_ROUNDOFF = 2.0**-8
STANDARD_ERRORS = 4


class ParityError(RuntimeError):
    """The two sides did not compute the same loss on the same rows: a time would compare different work."""


def measure(
    *,
    tokens: Sequence[int] | None = None,
    pairs: int = DEFAULT_PAIRS,
    quick: bool = False,
    threads: int = DEFAULT_THREADS,
    device: str = "cpu",
    seed: int = 0,
    workload: Workload | None = None,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time training steps of both trainers in turn and say by how much ours is faster.

    A step is the next batch (fetch and collate), forward, backward, gradient clipping, AdamW and the schedule, through
    the trainers' own methods. Both sides start from the same weights and see the same rows, packed by TRL. Per row
    length: one step each whose losses must agree (`ParityError` otherwise), one pair to warm up, then `pairs` pairs in
    alternating order. An interrupt ends the run; what was finished is returned, marked incomplete.

    Args:
        tokens: row lengths (``max_length``); by default 256 to 8192 on the CPU, 4096 to 32768 on CUDA.
        pairs: timed steps per side; 5 give an interval that covers 93.75 %, 6 one of at least 95 %.
        quick: under TRL's defaults only the few row lengths of the workload's `quick_tokens`.
        threads: torch's intra-op threads for the run.
        device: ``cpu`` or ``cuda``. On CUDA larger shapes are trained, in bf16, and CUDA events are read.
        seed: of weights, documents and order.
        workload: other shapes; `CPU` or `CUDA` by default.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`). A row has per side ``seconds`` (median, interval, every time), ``tokens_per_second``,
        ``phases`` (median seconds of data, forward, backward, optimizer) and ``losses``; ``ratio``: stock's seconds /
        ours, pair by pair; ``target``: the least ratio promised, or None; ``other_load``: the cores that other
        processes kept busy meanwhile, None where the system does not tell.

    Raises:
        UserError: a row length below the longest document, no pair, no thread, or a device that is not there.
        ParityError: the losses of the first step differ, or the two sides were given different rows.
    """
    work = workload or (CUDA if device == "cuda" else CPU)
    lengths = tuple(tokens or work.tokens)
    _check_arguments(work, lengths, pairs, threads, device)
    plan = [
        (setting, length)
        for setting in work.settings
        for length in lengths
        if not (quick and setting == TRL_DEFAULTS and length not in work.quick_tokens)
    ]
    tasks = []
    for setting, length in plan:
        label = {"setting": setting.name, "gradient_checkpointing": setting.gradient_checkpointing, "tokens": length}
        measure_row = partial(_judged_row, work, setting, length, pairs, device, seed)
        tasks.append(RowTask(label, measure_row, empty={"target": None, "below_target": None}))
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case=CASE,
            settings={
                **asdict(work.shape),
                "model": "qwen3",
                "documents": {"shortest": work.shortest, "longest": work.longest, "distribution": "uniform"},
                "batch_size": 1,
                "pairs": pairs,
                "warmup_steps": GATE_STEPS + WARMUP_PAIRS,
                "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
                "stock": "trl.SFTTrainer, attn_implementation=sdpa",
            },
            apart={"quick": quick},
            device=device,
            threads=threads,
            seed=seed,
            file=file,
            loud=(ParityError,),
            progress=progress,
        )


def _judged_row(
    work: Workload, setting: Setting, tokens: int, pairs: int, device: str, seed: int, _seconds: float
) -> dict[str, Any]:
    row = _measure_row(work, setting, tokens, pairs, device, seed)
    return row | _judged(row, setting, work)


def _check_arguments(work: Workload, lengths: tuple[int, ...], pairs: int, threads: int, device: str) -> None:
    if pairs < 1:
        raise UserError(f"pairs={pairs} times nothing: give 1 or more, 6 or more for an interval of 95 %")
    if threads < 1:
        raise UserError(f"threads={threads} is below 1: give the number of cores to use")
    if min(lengths) < work.longest:
        raise UserError(
            f"tokens={min(lengths)} is shorter than the longest document ({work.longest} tokens), which would be cut: "
            f"give {work.longest} or more"
        )
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device!r} is not known: use cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda', but torch sees no CUDA device: use --device cpu")
    if device == "cuda" and torch.cuda.device_count() > 1:
        raise UserError(
            f"torch sees {torch.cuda.device_count()} CUDA devices, and the trainers would split each batch: set "
            "CUDA_VISIBLE_DEVICES=0"
        )


def _judged(row: Mapping[str, Any], setting: Setting, work: Workload) -> dict[str, Any]:
    """Return the promised ratio, which is about the default shapes on the CPU; other rows are reported only."""
    if setting != PLAIN or work is not CPU:
        return {"target": None, "below_target": None}
    target = TARGETS.get(row["tokens"], FLOOR)
    return {"target": target, "below_target": row["ratio"]["median"] < target}


def _measure_row(work: Workload, setting: Setting, tokens: int, pairs: int, device: str, seed: int) -> dict[str, Any]:
    clock = clock_of(device)
    steps = GATE_STEPS + WARMUP_PAIRS + pairs
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        trainers = make_trainers(work, setting, tokens, steps, device, seed, folder)
        ours = trainers[OURS]
        stack.enter_context(ours._fastpack_features())
        path = ours.fastpack_report["packed_attention"].path
        sides = {name: SteppedTrainer(trainer, clock, steps) for name, trainer in trainers.items()}

        runs = {name: side.step for name, side in sides.items()}
        gate = {name: run() for name, run in runs.items()}
        _check_rows(gate)
        parity = check_parity(
            float(gate[STOCK].loss), float(gate[OURS].loss), tokens=gate[STOCK].input_ids.numel(), bf16=setting.bf16
        )
        load = OtherLoad()
        found = take_turns(runs, rounds=pairs, warmup=WARMUP_PAIRS, clock=clock, loud=FAILURES, after_round=_check_rows)
        other_load = load.cores()
        precision = ours.accelerator.mixed_precision
    gc.collect()  # the sides hold cycles; the next row must not run beside their memory
    first = found.results[STOCK]
    return {
        "setting": setting.name,
        "mixed_precision": precision,
        "gradient_checkpointing": setting.gradient_checkpointing,
        "tokens": tokens,
        "path": path,
        "parity": parity,
        "batch_tokens": [step.input_ids.numel() for step in first],
        "batch_documents": [step.documents for step in first],
        "order": found.order,
        "other_load": other_load,
        **{name: side_figures(found.seconds[name], found.results[name], clock) for name in (STOCK, OURS)},
        "ratio": found.ratio(STOCK, OURS),
    }


def check_parity(stock: float, ours: float, *, tokens: int, bf16: bool) -> dict[str, float]:
    """Check that both sides computed the same loss from the same weights and rows.

    Args:
        stock, ours: mean loss per token of the first batch.
        tokens: of that batch.
        bf16: whether the step computed in bf16. The bound is then four standard errors of independent roundings,
            ``4 * 2**-8 * sqrt(2 / tokens)``; in fp32 it is 1e-5 of the loss.

    Raises:
        ParityError: further apart than the bound, or not finite.
    """
    bound = STANDARD_ERRORS * BF16_ROUNDOFF * math.sqrt(2 / tokens) if bf16 else FLOAT32_PARITY * abs(stock)
    difference = abs(ours - stock)
    if not difference <= bound:  # a NaN is over every bound
        raise ParityError(
            f"the loss of the first batch is {ours!r} with fastpack and {stock!r} with stock: {difference:.2e} apart, "
            f"bound {bound:.2e}; a time would compare different work"
        )
    return {"stock_loss": stock, "fastpack_loss": ours, "difference": difference, "bound": bound}


def _check_rows(pair: Mapping[str, Step]) -> dict[str, str]:
    """Raise `ParityError` after a round whose two sides were given different rows."""
    if not torch.equal(pair[STOCK].input_ids, pair[OURS].input_ids):
        raise ParityError("the two trainers were given different rows: a time would compare different work")
    return {}
