"""What preparation does to a data set: documents, tokens, truncation, fill. Read from Arrow offsets, not row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from fastpack_trl.packing.packed_batch import IGNORE_INDEX


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """A map-style data set before and after preparation; counts in documents and tokens.

    Attributes:
        documents, tokens: as tokenized, before truncation and packing.
        empty_documents: documents without a token, skipped.
        truncated_documents, truncated_tokens: lost to `max_length`.
        longest: tokens of the longest document: the `max_length` that truncates nothing.
        rows: rows after packing; None where rows are documents.
        fill: share of the packed rows' capacity (rows x max_length) that holds tokens; None where nothing is packed.
    """

    documents: int
    tokens: int
    empty_documents: int
    truncated_documents: int
    truncated_tokens: int
    longest: int
    rows: int | None = None
    fill: float | None = None

    def truncation(self, max_length: int | None) -> str:
        """One line for the banner, with the setting that avoids the loss."""
        if not self.truncated_tokens:
            return f"none (longest document {self.longest:,} tokens, max_length {max_length})"
        share = self.truncated_tokens / self.tokens
        return (
            f"{self.truncated_tokens:,} tokens ({share:.1%}) of {self.truncated_documents:,} documents cut by "
            f"max_length={max_length}; max_length={self.longest} or packing_strategy='bfd_split' keeps them"
        )


def column_lengths(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Items per row of a list column, in the data set's order."""
    table = dataset.with_format("arrow")[:]
    lengths = pc.list_value_length(table[column])
    return np.asarray(pc.fill_null(lengths, 0).to_numpy(), dtype=np.int64)


def check_tokens(dataset: Dataset, vocab_size: int | None, name: str = "train") -> None:
    """Check a tokenized data set once, on the host, before anything is trained on it.

    Raises:
        ValueError: labels of another length than `input_ids`, or token ids or labels outside the vocabulary; names the
            first row and the value.
    """
    table = dataset.with_format("arrow")[:]
    columns = set(table.column_names)
    if "input_ids" not in columns:
        return
    lengths = column_lengths(dataset, "input_ids")
    if "labels" in columns:
        labels = column_lengths(dataset, "labels")
        wrong = np.flatnonzero(labels != lengths)
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"row {row} of the {name} data set has {labels[row]} labels for {lengths[row]} input_ids: give one "
                f"label per token, {IGNORE_INDEX} where no loss is counted"
            )
    if vocab_size is None:
        return
    for column in sorted(columns & {"input_ids", "labels"}):
        values = _flat(table[column])
        allowed = (IGNORE_INDEX,) if column == "labels" else ()
        low, high = _range(values, allowed)
        bad = low if low < 0 else high
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"the {name} data set has the {'label' if column == 'labels' else 'token id'} {bad} in {column!r}, "
                f"outside the model's vocabulary of {vocab_size}: tokenize it with the model's own tokenizer, or "
                f"resize the model's embeddings"
            )


def drop_empty(dataset: Dataset) -> tuple[Dataset, int]:
    """The data set without documents of length 0, and how many there were."""
    lengths = column_lengths(dataset, "input_ids")
    empty = int((lengths == 0).sum())
    return (dataset.select(np.flatnonzero(lengths)), empty) if empty else (dataset, 0)


def measure(
    tokenized: Dataset,
    prepared: Dataset,
    *,
    max_length: int | None,
    strategy: str | None,
    empty_documents: int = 0,
) -> DatasetFacts:
    """Compare a data set before truncation with the one that will be trained on.

    Args:
        tokenized: one document per row.
        prepared: what training reads: packed rows with `seq_lengths`, or truncated documents.
        max_length: the limit of a row, in tokens.
        strategy: the packing strategy; None where nothing is packed.
        empty_documents: documents that were skipped before.
    """
    lengths = column_lengths(tokenized, "input_ids")
    # Only these two paths cut; `bfd_split` and `wrapped` continue a long document in the next row.
    cuts = max_length is not None and strategy in (None, "bfd")
    lost = np.maximum(lengths - int(max_length or 0), 0) if cuts else np.zeros_like(lengths)
    rows = fill = None
    if strategy is not None and max_length:
        rows = len(prepared)
        fill = float(column_lengths(prepared, "input_ids").sum() / (rows * max_length)) if rows else 0.0
    return DatasetFacts(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        empty_documents=empty_documents,
        truncated_documents=int((lost > 0).sum()),
        truncated_tokens=int(lost.sum()),
        longest=int(lengths.max()) if lengths.size else 0,
        rows=rows,
        fill=fill,
    )


def highest_padding_cost(prepared: Dataset) -> float:
    """The largest ratio of padded to real tokens over packed rows, were each unpacked into padded rows."""
    table = prepared.with_format("arrow")[:]
    if "seq_lengths" not in table.column_names or not len(prepared):
        return 1.0
    documents = column_lengths(prepared, "seq_lengths")
    flat = _flat(table["seq_lengths"]).to_numpy(zero_copy_only=False)
    starts = np.concatenate([[0], np.cumsum(documents)[:-1]])
    longest = np.maximum.reduceat(flat, starts)
    return float((longest * documents / np.add.reduceat(flat, starts)).max())


def _flat(column: Any) -> Any:
    # `flatten` follows each chunk's offsets, so a sliced or re-ordered table is read in its own order.
    return pa.concat_arrays([chunk.flatten() for chunk in column.chunks]) if column.num_chunks else pa.array([])


def _range(values: Any, allowed: tuple[int, ...]) -> tuple[int, int]:
    for value in allowed:
        values = values.filter(pc.not_equal(values, value))
    if not len(values):
        return 0, 0
    extremes = pc.min_max(values).as_py()
    return int(extremes["min"]), int(extremes["max"])
