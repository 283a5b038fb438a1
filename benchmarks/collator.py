"""Host time of one training batch: fetch from the packed dataset and collate, TRL's way and ours, on the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl.bench.environment import limited_threads
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.packing.batching import ArrowRows
from fastpack_trl.packing.collator import PackingCollator

SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 64, 1024
VOCAB_SIZE = 32_000
ROWS, ROWS_PER_BATCH = 64, 1


def measure(
    *,
    tokens_per_row: int = 8192,
    rows: int = ROWS,
    rounds: int = 7,
    seed: int = 0,
    rows_per_batch: int = ROWS_PER_BATCH,
) -> dict[str, Any]:
    """Time both sides in one process on one core, in alternating order, and say by how much ours is faster.

    Documents of 64 to 1024 tokens (uniform), a quarter of each without loss, are packed by TRL. Each side reads the
    same dataset as its trainer does: TRL's in Python format, ours from Arrow's memory. One round fetches and collates
    every row once on both sides.

    Args:
        tokens_per_row: capacity of a packed row, in tokens.
        rows: packed rows per round.
        rounds: timed rounds, after one that is not timed. An interval of 95 % needs 6.
        seed: of documents and tokens.
        rows_per_batch: rows collated into one batch (``per_device_train_batch_size``).

    Returns:
        Plain data for JSON: for ``trl`` and ``fastpack`` ``seconds`` (one per round) and ``tokens_per_second``; under
        ``ratio`` ours to theirs, round by round. A statistic is ``{"median", "low", "high", "coverage"}``: an interval
        of order statistics that covers the median with at least that probability, whatever the distribution.

    Raises:
        ValueError: an argument below its minimum.
    """
    for name, value, least in (
        ("tokens_per_row", tokens_per_row, SHORTEST_DOCUMENT),
        ("rows", rows, 1),
        ("rounds", rounds, 1),
        ("rows_per_batch", rows_per_batch, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} is below {least}: give {least} or more")

    packed = _packed_dataset(tokens_per_row, rows, seed)
    tokens = sum(map(len, packed["input_ids"]))
    rows_of_arrow = ArrowRows(packed, packed.column_names)
    theirs, ours = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), PackingCollator(pad_token_id=0)
    batches = [list(range(start, min(start + rows_per_batch, rows))) for start in range(0, rows, rows_per_batch)]
    collate: dict[str, Callable[[list[int]], Any]] = {
        "trl": lambda indices: theirs(packed.__getitems__(indices)),
        "fastpack": lambda indices: ours(rows_of_arrow.__getitems__(indices)),
    }

    def every_row(name: str) -> None:
        for indices in batches:
            collate[name](indices)

    with limited_threads(1):
        for indices in batches:  # also the round that warms up
            _check_equal(collate["trl"](indices), collate["fastpack"](indices))
        sides = {name: partial(every_row, name) for name in collate}
        found = take_turns(sides, rounds=rounds, warmup=0, loud=FAILURES)
    rates = {name: [tokens / value for value in values] for name, values in found.seconds.items()}
    return {
        "tokens_per_round": tokens,
        "documents": sum(map(len, packed["seq_lengths"])),
        **{
            name: {"seconds": values, "tokens_per_second": median_interval(rates[name]).to_dict()}
            for name, values in found.seconds.items()
        },
        "ratio": found.ratio("trl", "fastpack"),
    }


def _packed_dataset(tokens_per_row: int, rows: int, seed: int) -> datasets.Dataset:
    random = np.random.default_rng(seed)
    longest = min(LONGEST_DOCUMENT, tokens_per_row)
    # A fifth more than fill the rows: the last row of each window that TRL packs is not full.
    count = math.ceil(1.2 * rows * tokens_per_row / ((SHORTEST_DOCUMENT + longest) / 2)) + 8
    documents = [
        random.integers(0, VOCAB_SIZE, length).tolist()
        for length in random.integers(SHORTEST_DOCUMENT, longest + 1, count)
    ]
    labels = [[-100] * (len(ids) // 4) + ids[len(ids) // 4 :] for ids in documents]
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        packed = pack_dataset(
            datasets.Dataset.from_dict({"input_ids": documents, "labels": labels}), tokens_per_row, "bfd"
        )
    finally:
        if not quiet:
            datasets.enable_progress_bars()
    assert len(packed) >= rows
    return packed.select(range(rows))


def _check_equal(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `AssertionError` where ours differs: a faster wrong answer is no result."""
    for name, value in theirs.items():
        same = torch.equal(value, ours[name]) if isinstance(value, torch.Tensor) else value == ours[name]
        assert same, f"{name} differs from TRL's"
