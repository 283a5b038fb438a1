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

from benchmarks.cases import Run, row_lengths
from benchmarks.steps import Step, SteppedTrainer, side_figures
from benchmarks.workload import CPU, CUDA, OURS, STOCK, TRL_DEFAULTS, Setting, Workload, make_trainers
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import clock_of

DEFAULTS = Run(rounds=5, seconds=math.inf)
GATE_STEPS, WARMUP_PAIRS = 1, 1

FLOAT32_PARITY = 1e-5
# In bf16 each side rounds each token's logits, which are of order 1 with random weights: a token's loss is off by about
# one unit roundoff, and the mean over n independent tokens by that over sqrt(n). The bound is four standard errors of
# the difference of two such means. Documents that see their neighbours move each token's loss by tens of units.
BF16_ROUNDOFF = 2.0**-8
STANDARD_ERRORS = 4


class ParityError(RuntimeError):
    """The two sides did not compute the same loss on the same rows: a time would compare different work."""


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, quick: bool = False, workload: Workload | None = None
) -> dict[str, Any]:
    """Time training steps of both trainers in turn and say by how much ours is faster.

    A step is the next batch (fetch and collate), forward, backward, gradient clipping, AdamW and the schedule, through
    the trainers' own methods. Both sides start from the same weights and see the same rows, packed by TRL. Per row
    length: one step each whose losses must agree, one pair to warm up, then the rounds in alternating order.

    Args:
        run: 6 rounds give an interval of 95 %. On CUDA larger shapes are trained, in bf16, and CUDA events are read.
        tokens: row lengths (``max_length``); by default 256 to 8192 on the CPU, 4096 to 32768 on CUDA.
        quick: under TRL's defaults only the few row lengths of the workload's `quick_tokens`.
        workload: other shapes; `CPU` or `CUDA` by default.

    Returns:
        A record. A row has per side ``seconds`` (median, interval, every time), ``tokens_per_second``, ``phases``
        (median seconds of data, forward, backward, optimizer) and ``losses``; ``ratio``: stock's seconds / ours, pair
        by pair; ``other_load``: the cores that other processes kept busy meanwhile.

    Raises:
        UserError: a row length below the longest document, or more than one CUDA device.
        ParityError: the losses of the first step differ, or the two sides were given different rows.
    """
    work = workload or (CUDA if run.device == "cuda" else CPU)
    refuse_several_devices(run.device)
    tasks = [
        RowTask(
            {"setting": setting.name, "gradient_checkpointing": setting.gradient_checkpointing, "tokens": length},
            partial(_measure_row, run, work, setting, length),
            empty={},
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
    return run.record("packed_attention", tasks, settings, apart={"quick": quick}, loud=(ParityError,))


def refuse_several_devices(device: str) -> None:
    """Raise `UserError` where torch sees several GPUs."""
    if device == "cuda" and torch.cuda.device_count() > 1:
        raise UserError(
            f"torch sees {torch.cuda.device_count()} CUDA devices, and the trainers would split each batch: set "
            "CUDA_VISIBLE_DEVICES=0"
        )


def _measure_row(run: Run, work: Workload, setting: Setting, tokens: int, _seconds: float) -> dict[str, Any]:
    clock = clock_of(run.device)
    steps = GATE_STEPS + WARMUP_PAIRS + run.rounds
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        trainers = make_trainers(work, setting, tokens, steps, run.device, run.seed, folder)
        ours = trainers[OURS]
        stack.enter_context(ours._fastpack_features())
        path = ours.fastpack_report["packed_attention"].path
        sides = {name: SteppedTrainer(trainer, clock, steps).step for name, trainer in trainers.items()}
        gate = {name: step() for name, step in sides.items()}
        _check_rows(gate)
        parity = check_parity(
            float(gate[STOCK].loss), float(gate[OURS].loss), tokens=gate[STOCK].input_ids.numel(), bf16=setting.bf16
        )
        load = OtherLoad()
        found = take_turns(
            sides, rounds=run.rounds, warmup=WARMUP_PAIRS, clock=clock, loud=FAILURES, after_round=_check_rows
        )
        other_load = load.cores()
        precision = ours.accelerator.mixed_precision
    gc.collect()  # the sides hold cycles; the next row must not run beside their memory
    first = found.results[STOCK]
    return {
        "mixed_precision": precision,
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
