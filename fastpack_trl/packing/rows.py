"""Rows of a packed data set straight from Arrow's memory, as NumPy views."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from datasets import Dataset as ArrowDataset
from torch.utils.data import Dataset


class ArrowRows(Dataset[dict[str, Any]]):
    """A map-style view of a `datasets.Dataset` with integer list columns: ``rows[i] -> {"input_ids": ndarray, ...}``.

    Each value is a read-only NumPy view of the Arrow buffer where that is possible; `datasets`' own NumPy format builds
    the same arrays through a formatter that costs more than the rest of a batch (measured by
    ``python -m benchmarks --case collator``).

    Args:
        dataset: the data set; its order (shuffle, select) is kept.
        columns: the list columns to read; those that the data set lacks are left out.
    """

    def __init__(self, dataset: ArrowDataset, columns: Sequence[str]) -> None:
        self.columns = [column for column in columns if column in dataset.column_names]
        self.table = dataset.select_columns(self.columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows at once; called by torch's data loader."""
        rows: list[dict[str, Any]] = [{} for _ in indices]
        for column, values in zip(self.columns, self.table[list(indices)].columns, strict=True):
            row = iter(rows)
            for chunk in values.chunks:
                flat = chunk.values.to_numpy(zero_copy_only=False)
                bounds = chunk.offsets.to_numpy()
                for start, end in pairwise(bounds):
                    next(row)[column] = flat[start:end]
        return rows
