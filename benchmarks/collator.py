"""Host time of one training batch: fetch from the packed dataset and collate, TRL's way and ours, on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from benchmarks.case_tables import table
from benchmarks.cases import Run, add_sizes, row_lengths
from benchmarks.command import CaseCommand
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.packing.batching import ArrowRows
from fastpack_trl.packing.collator import PackingCollator

DEFAULTS = Run(rounds=7, threads=1, seconds=math.inf)
TOKENS = 8192
SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 64, 1024
VOCAB_SIZE = 32_000
ROWS = 64


def measure(run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, count: int = ROWS) -> dict[str, Any]:
    """Time both sides in one process on one core, in alternating order, and say by how much ours is faster.

    Documents of 64 to 1024 tokens (uniform), a quarter of each without loss, are packed by TRL. Each side reads the
    same dataset as its trainer does: TRL's in Python format, ours from Arrow's memory. One round fetches and collates
    every row once on both sides.

    Args:
        count: packed rows per round.

    Returns:
        A record; a row has, of both sides, ``seconds`` (one per round) and ``tokens_per_second``; under ``ratio`` ours
        to theirs, round by round.

    Raises:
        UserError: a row below the shortest document.
    """
    label = {"setting": "fetch and collate, one core", "path": "PackingCollator"}
    tasks = [
        RowTask({**label, "tokens": length}, partial(_row, run, length, count))
        for length in row_lengths(tokens, [TOKENS], SHORTEST_DOCUMENT)
    ]
    return run.record("collator", tasks, {"rows": count, "rows_per_batch": 1}, loud=(UserError,))


def _row(run: Run, tokens_per_row: int, count: int, _seconds: float) -> dict[str, Any]:
    load = OtherLoad()
    packed = _packed_dataset(tokens_per_row, count, run.seed)
    tokens = sum(map(len, packed["input_ids"]))
    rows_of_arrow = ArrowRows(packed, packed.column_names)
    theirs, ours = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), PackingCollator(pad_token_id=0)
    collate: dict[str, Callable[[list[int]], Any]] = {
        "stock": lambda indices: theirs(packed.__getitems__(indices)),
        "fastpack": lambda indices: ours(rows_of_arrow.__getitems__(indices)),
    }

    def every_row(name: str) -> None:
        for index in range(count):
            collate[name]([index])

    for index in range(count):  # also the round that warms up
        _check_equal(collate["stock"]([index]), collate["fastpack"]([index]))
    sides = {name: partial(every_row, name) for name in collate}
    found = take_turns(sides, rounds=run.rounds, warmup=0, loud=FAILURES)
    return {
        "tokens_per_round": tokens,
        "documents": sum(map(len, packed["seq_lengths"])),
        **{
            name: {
                "seconds": values,
                "tokens_per_second": median_interval([tokens / each for each in values]).to_dict(),
            }
            for name, values in found.seconds.items()
        },
        "ratio": found.ratio("stock", "fastpack"),
        "other_load": load.cores(),
    }


def _packed_dataset(tokens_per_row: int, rows: int, seed: int) -> datasets.Dataset:
    random = np.random.default_rng(seed)
    longest = min(LONGEST_DOCUMENT, tokens_per_row)
    # A fifth more than fill the rows: the last row of each window that TRL packs is not full.
    count = math.ceil(1.2 * rows * tokens_per_row / ((SHORTEST_DOCUMENT + longest) / 2)) + 8
    lengths = random.integers(SHORTEST_DOCUMENT, longest + 1, count)
    documents = [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
    labels = [[-100] * (len(ids) // 4) + ids[len(ids) // 4 :] for ids in documents]
    whole = datasets.Dataset.from_dict({"input_ids": documents, "labels": labels})
    packed = pack_dataset(whole, tokens_per_row, "bfd")
    assert len(packed) >= rows
    return packed.select(range(rows))


def _check_equal(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `AssertionError` where ours differs: a faster wrong answer is no result."""
    for name, value in theirs.items():
        same = torch.equal(value, ours[name]) if isinstance(value, torch.Tensor) else value == ours[name]
        assert same, f"{name} differs from TRL's"


COMMAND = CaseCommand(
    case="collator", help=__doc__, rounds=DEFAULTS.rounds, seconds=DEFAULTS.seconds, table=table,
    record=lambda args, file: measure(replace(Run.of(args, file), device="cpu", threads=1), tokens=args.tokens),
    more=add_sizes,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
