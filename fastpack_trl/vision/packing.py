"""Rows across a data set of images and text: lengths of samples by TRL's collator, and samples that fit together."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset as MapDataset

from fastpack_trl.errors import DataError
from fastpack_trl.packing.shared_keys import Ints
from fastpack_trl.vision.rows import ROW, collated

BY_PLACE = ("random", "sequential")
"""Values of `train_sampling_strategy` that read no example: those of a view may be lists of samples."""
LIMIT = "image_row_tokens"
_MOST_PIXELS = 1.5
"""Times the mean of a full row: numbers in the pixel tensors of a row, by which the work of a tower grows."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of samples: ``rows=[[0, 3], [1]]``, of at most `limit` tokens.

    Attributes:
        rows: samples of each row, in the order of the data set.
        limit: tokens of a row.
        longest: tokens of the longest sample in a row.
        pixels: most numbers in the pixel tensors of a row.
        fill: share of the capacity of the rows that holds tokens.
        left_out: samples of more tokens than `limit`.
    """

    rows: list[list[int]]
    limit: int
    longest: int
    pixels: int
    fill: float
    left_out: list[int]

    def __str__(self) -> str:
        samples, gone = sum(map(len, self.rows)), len(self.left_out)
        named = ", ".join(map(str, self.left_out[:5])) + ", ..." * (gone > 5)
        left_out = f"; {gone:,} longer samples are left out: rows {named} of the data set" if gone else ""
        filled = f"{self.fill:.1%} of {self.limit:,} tokens filled"
        return f"{samples:,} samples in {len(self.rows):,} row{'s' * (len(self.rows) > 1)}, {filled}{left_out}"


class Samples(MapDataset[list[dict[str, Any]]]):
    """A view of a data set: item k is the list of the samples of row k, each with its place in the data set.

    Args:
        dataset: of samples.
        rows: samples of each row; None: one.
    """

    def __init__(self, dataset: Any, rows: Sequence[Sequence[int]] | None = None) -> None:
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.dataset if self.rows is None else self.rows)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self._read(place) for place in ([index] if self.rows is None else self.rows[index])]

    def _read(self, place: int) -> dict[str, Any]:
        try:
            return {**self.dataset[place], ROW: place}
        except Exception as error:
            error.add_note(f"in row {place} of the data set")
            raise


def pack_samples(dataset: Any, stock: Any, limit: int, num_proc: int | None = None, name: str = LIMIT) -> PackedRows:
    """Return rows of samples of up to `limit` tokens; longer samples are left out, never cut.

    Args:
        dataset: a `datasets.Dataset`, whose cache keeps the counts.
        stock: TRL's collator, which runs once over each sample: exact for every processor.
        name: of the field that limits rows, for the error.

    Raises:
        DataError: no sample is short enough.
    """
    keywords = {"remove_columns": dataset.column_names, "num_proc": num_proc, "desc": "Counting the tokens of samples"}
    try:
        counts = dataset.map(counting(stock), with_indices=True, **keywords)
    except Exception:
        for _ in map(Samples(dataset).__getitem__, range(len(dataset))):
            pass  # an image that cannot be read raises here, with its row
        raise
    counts.set_format(None)  # a transform of the user is for samples
    tokens, pixels = (np.asarray(counts[name], dtype=np.int64) for name in ("tokens", "pixels"))
    kept = tokens <= limit
    if not kept.any():
        unset = ", or set it to null" if name != LIMIT else ""
        raise DataError(f"{name}={limit}: the shortest sample has {tokens.min():,} tokens: raise it{unset}")
    mean = pixels[kept].sum() / tokens[kept].sum() * limit
    most = max(int(mean * _MOST_PIXELS), int(pixels[kept].max()))
    rows = fit(tokens, pixels, limit, most)
    fill = tokens[kept].sum() / (len(rows) * limit)
    per_row = max(int(pixels[row].sum()) for row in rows)
    return PackedRows(rows, limit, int(tokens[kept].max()), per_row, float(fill), (~kept).nonzero()[0].tolist())


def counting(stock: Any) -> Callable[[dict[str, Any], int], dict[str, int]]:
    """Return the function that counts tokens and pixels of a sample; its hash is the key of the cache."""
    return partial(_count, replace(stock, max_length=None))


def _count(stock: Any, sample: dict[str, Any], place: int) -> dict[str, int]:
    batch = collated(stock, [{**sample, ROW: place}])
    pixels = batch.get("pixel_values")
    return {"tokens": int(batch["attention_mask"].sum()), "pixels": 0 if pixels is None else pixels.numel()}


def fit(tokens: Ints, pixels: Ints, most_tokens: int, most_pixels: int) -> list[list[int]]:
    """Return the samples of each row by best-fit decreasing on tokens, of those that fit into a row of their own."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left, row; sorted
    seen: list[int] = []  # pixels of each row
    for sample in np.argsort(-tokens, kind="stable").tolist():
        length, size = int(tokens[sample]), int(pixels[sample])
        if length > most_tokens:
            continue
        places = range(bisect.bisect_left(free, (length, 0)), len(free))
        place = next((at for at in places if seen[free[at][1]] + size <= most_pixels), None)
        left, row = (most_tokens, len(rows)) if place is None else free.pop(place)
        if place is None:
            rows.append([])
            seen.append(0)
        rows[row].append(sample)
        seen[row] += size
        bisect.insort(free, (left - length, row))
    return sorted(sorted(row) for row in rows)
