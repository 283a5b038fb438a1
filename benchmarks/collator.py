"""Host time of one training batch: fetch from the packed dataset and collate, TRL's way and ours, on the same rows."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import torch
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl.measure.record import version_of
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.rows import ArrowRows

SHORTEST_DOCUMENT, LONGEST_DOCUMENT = 64, 1024
VOCAB_SIZE = 32_000
ROWS, ROWS_PER_BATCH = 64, 1
PACKAGES = ("trl", "transformers", "datasets", "torch", "numpy", "fastpack-trl")


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
    sides: dict[str, Callable[[list[int]], Any]] = {
        "trl": lambda indices: theirs(packed.__getitems__(indices)),
        "fastpack": lambda indices: ours(rows_of_arrow.__getitems__(indices)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with _one_thread():
        for indices in batches:  # also the round that warms up
            _check_equal(sides["trl"](indices), sides["fastpack"](indices))
        for index in range(rounds):
            for name in sorted(sides, reverse=index % 2 == 0):
                start = time.perf_counter()
                for indices in batches:
                    sides[name](indices)
                seconds[name].append(time.perf_counter() - start)

    rates = {name: [tokens / value for value in values] for name, values in seconds.items()}
    return {
        "case": "collator",
        "settings": {
            "tokens_per_row": tokens_per_row,
            "rows": rows,
            "rounds": rounds,
            "seed": seed,
            "rows_per_batch": rows_per_batch,
        },
        "tokens_per_round": tokens,
        "documents": sum(map(len, packed["seq_lengths"])),
        **{
            name: {"seconds": values, "tokens_per_second": median_interval(rates[name])}
            for name, values in seconds.items()
        },
        "ratio": median_interval([a / b for a, b in zip(rates["fastpack"], rates["trl"], strict=True)]),
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": {"processor": platform.machine(), "threads": 1},
    }


def median_interval(values: list[float], coverage: float = 0.95) -> dict[str, float]:
    """The median and the narrowest pair of order statistics around it that covers it with at least `coverage`.

    With fewer than 6 values not even the extremes do: they are given, with the coverage that they have.
    """
    ordered, count = sorted(values), len(values)
    tail, cut = 0.5**count, 0  # probability that the median lies below the value at `cut`
    while cut + 1 < count / 2:
        wider = tail + math.comb(count, cut + 1) * 0.5**count
        if 1 - 2 * wider < coverage:
            break
        tail, cut = wider, cut + 1
    return {
        "median": float(np.median(ordered)),
        "low": ordered[cut],
        "high": ordered[count - 1 - cut],
        "coverage": max(0.0, 1 - 2 * tail),
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


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_equal(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """A faster wrong answer is no result."""
    for name, value in theirs.items():
        same = torch.equal(value, ours[name]) if isinstance(value, torch.Tensor) else value == ours[name]
        assert same, f"{name} differs from TRL's"


def _version(package: str) -> str:
    if package == "fastpack-trl":
        from fastpack_trl import __version__

        return __version__
    return version_of(package)
