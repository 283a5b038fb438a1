"""Stock's preparation of a data set in two passes, and its effect: documents, tokens, truncation, fill.

Documents are checked and counted before they are cut, from Arrow's offsets, not row by row.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, List
from numpy.typing import NDArray

from fastpack_trl.errors import DataError, shown
from fastpack_trl.packing.examples import WithoutLoss, chunks, is_integer_list, null_padding
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

_ROWS_OF_A_DIGEST = 32  # whose tokens are read; of all the others, their lengths


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """A map-style data set before and after preparation; counts in documents and tokens.

    Attributes:
        documents, tokens: as tokenized, before truncation and packing.
        empty_documents: documents without a token, skipped.
        truncated_documents, truncated_tokens: lost to `max_length`.
        longest: tokens of the longest document: the `max_length` that truncates nothing.
        rows: rows after packing; None where rows are documents.
        loss_tokens: tokens of the prepared data set that the loss counts.
        without_loss: documents of which the loss counts no token.
        padding: tokens that a column `attention_mask` excludes and the loss counts.
        fill: share of the packed rows' capacity (rows x max_length) that holds tokens; None where nothing is packed.
    """

    documents: int
    tokens: int
    empty_documents: int
    truncated_documents: int
    truncated_tokens: int
    longest: int
    loss_tokens: int
    without_loss: WithoutLoss
    padding: int
    rows: int | None = None
    fill: float | None = None

    def lines(self, max_length: int | None) -> dict[str, Any]:
        """Return the figures that a report shows of a data set whose rows hold up to `max_length` tokens."""
        out: dict[str, Any] = {"documents": f"{self.documents:,} ({self.tokens:,} tokens)"}
        if self.empty_documents:
            out["skipped empty documents"] = self.empty_documents
        if self.fill is not None:
            out["packing fill"] = f"{self.fill:.1%} of {self.rows:,} rows x {max_length} tokens"
        cut = f"none (longest document {self.longest:,} tokens, max_length {max_length})"
        if self.truncated_tokens:
            split = " or packing_strategy='bfd_split'" if self.fill is not None else ""  # no strategy without packing
            cut = (
                f"{self.truncated_tokens:,} tokens ({self.truncated_tokens / self.tokens:.1%}) of "
                f"{self.truncated_documents:,} documents cut by max_length={max_length}; "
                f"max_length={self.longest}{split} keeps them"
            )
        out["truncated tokens"] = cut
        if lost := str(self.without_loss):
            out["documents without loss tokens"] = lost
        if self.padding:
            out["padding trained on"] = (
                f"{self.padding:,} tokens with attention_mask 0, a column that TRL does not read: remove them, or set "
                f"their labels to {IGNORE_INDEX}"
            )
        if not self.loss_tokens:
            out["loss tokens"] = "none: no token of this data set is counted by the loss, nothing will be learnt"
        return out


def can_prepare_in_two_passes(dataset: Any) -> bool:
    """Return whether `dataset` can be read before it is trained on: neither streamed, nor transformed, nor empty."""
    return not isinstance(dataset, IterableDataset) and dataset.format["type"] != "custom" and bool(len(dataset))


def prepare_in_two_passes(
    prepare: Callable[..., Any], dataset: Dataset, processing_class: Any, args: Any, packing: bool,
    formatting_func: Any, name: str, *, count: bool,
) -> tuple[Any, DatasetFacts | None]:  # fmt: skip
    """Tokenize, then truncate or pack, each by TRL's own preparation.

    Args:
        prepare: `SFTTrainer._prepare_dataset`, bound; its arguments follow.
        dataset: a data set for which `can_prepare_in_two_passes` returns True.
        count: measure the data set, and raise if nothing of it is left to train on.

    Returns:
        The prepared data set, and its facts if `count` and if its examples are token lists.

    Raises:
        DataError: an example that TRL cannot prepare, labels of another length than the tokens, no token, or none left.
    """
    whole = copy.copy(args)
    whole.max_length, whole.shuffle_dataset = None, False
    documents = prepare(dataset, processing_class, whole, False, formatting_func, name)
    if "input_ids" not in documents.column_names:
        raise DataError(
            f"the {name} data set has the columns {', '.join(dataset.column_names)}, none of which holds text or "
            f"conversations: set dataset_text_field (now {shown(args.dataset_text_field)}), or provide messages, "
            "prompt and completion, or input_ids"
        )
    if not is_token_lists(documents, ("input_ids", "labels")):
        return prepare(documents, processing_class, args, packing, None, name), None
    _check_labels(documents, name)
    lengths = column_lengths(documents, "input_ids")
    empty = int((lengths == 0).sum())
    if empty == len(lengths):
        raise DataError(f"the {name} data set has no token: all {empty} documents are empty")
    documents = documents.select(np.flatnonzero(lengths)) if empty else documents
    prepared = prepare(documents, processing_class, args, packing, None, name)
    if not count:
        return prepared, None
    if not len(prepared):
        raise DataError(_why_none_is_left(documents, args.max_length))
    return prepared, _measure(documents, prepared, args, args.packing_strategy if packing else None, empty)


def is_token_lists(dataset: Dataset, columns: Sequence[str]) -> bool:
    """Return whether `input_ids` is there, and each of `columns` that the data set has is a list of integers per row.

    A data set of empty lists has no integer type, but is one of them.
    """
    types = {name: dataset.features[name] for name in columns if name in dataset.column_names}
    return "input_ids" in types and all(
        isinstance(kind, List) and kind.length == -1 and is_integer_list(kind) for kind in types.values()
    )


def column_lengths(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Return the items per row of a list column, in the data set's order."""
    parts = [pc.fill_null(pc.list_value_length(chunk), 0).to_numpy() for chunk in chunks(dataset, column)]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def rows_digest(dataset: Dataset) -> str:
    """Return a digest of the rows in their order: how long all and their documents are, the tokens of a few.

    Packing sorts documents by length: those of another order may make rows of the same lengths.
    """
    digest = hashlib.blake2b(column_lengths(dataset, "input_ids"), digest_size=8)
    few = dataset.select(np.unique(np.linspace(0, len(dataset) - 1, _ROWS_OF_A_DIGEST, dtype=np.int64)))
    for part, column in ((dataset, "seq_lengths"), (few, "input_ids")):
        for chunk in chunks(part, column) if column in part.column_names else ():
            digest.update(chunk.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
    return digest.hexdigest()


def _check_labels(dataset: Dataset, name: str) -> None:
    """Check that a tokenized data set has one label per token."""
    if "labels" not in dataset.column_names:
        return
    lengths, labels = column_lengths(dataset, "input_ids"), column_lengths(dataset, "labels")
    wrong = np.flatnonzero(labels != lengths)
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"row {row} of the {name} data set has {labels[row]} labels for {lengths[row]} input_ids: give one label "
            f"per token, {IGNORE_INDEX} where no loss is counted"
        )


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Check every token id, and every label that may be counted, once, on the host.

    Raises:
        DataError: an id outside [0, vocab_size); names it.
    """
    for column, values in _indices(dataset):
        extremes = pc.min_max(values).as_py()
        for value in (extremes["min"], extremes["max"]):
            if value is not None and not 0 <= value < vocab_size:
                raise DataError(
                    f"the train data set has {int(value)} in {column!r}, outside the model's vocabulary of "
                    f"{vocab_size}: tokenize it with the model's own tokenizer, or resize the model's embeddings"
                )


def _indices(dataset: Dataset) -> Iterator[tuple[str, Any]]:
    """Yield, piece by piece, what indexes the vocabulary, with its column."""
    for chunk in chunks(dataset, "input_ids"):
        yield "input_ids", chunk.flatten()
    if "labels" in dataset.column_names:
        for values, counted in _counted(dataset, "labels"):
            yield "labels", values.filter(pa.array(counted))


def counted_tokens(dataset: Dataset) -> int:
    """Count the tokens of the loss, the first of each document left out."""
    column = "labels" if "labels" in dataset.column_names else "input_ids"
    return sum(int(counted.sum()) for _, counted in _counted(dataset, column))


def _counted(dataset: Dataset, column: str) -> Iterator[tuple[Any, NDArray[np.bool_]]]:
    """Yield labels piece by piece, and which of them a loss counts: not ignored, and not the first of a document."""
    if "seq_lengths" in dataset.column_names:
        lengths = np.concatenate([chunk.flatten().to_numpy() for chunk in chunks(dataset, "seq_lengths")])
    else:
        lengths = column_lengths(dataset, column)
    lengths = lengths[lengths > 0]
    starts = np.cumsum(lengths) - lengths
    offset = 0
    for chunk in chunks(dataset, column):
        values = chunk.flatten()
        counted = np.array(pc.fill_null(pc.not_equal(values, IGNORE_INDEX), False).to_numpy(zero_copy_only=False))
        here = starts[(starts >= offset) & (starts < offset + len(values))]
        counted[here - offset] = False
        offset += len(values)
        yield values, counted


def _why_none_is_left(documents: Dataset, max_length: int | None) -> str:
    """Say why stock dropped every document: none has a token within `max_length` that the loss counts."""
    if not counted_tokens(documents):
        return (
            f"the train data set has no token that the loss counts: all labels are {IGNORE_INDEX}; give labels, or "
            "completions that are not empty"
        )
    longest = int(column_lengths(documents, "input_ids").max())
    return (
        f"nothing of the train data set is left to train on: max_length={max_length} cuts every completion off, the "
        f"longest document has {longest:,} tokens: raise max_length, or shorten the prompts"
    )


def _measure(
    tokenized: Dataset, prepared: Dataset, args: Any, strategy: str | None, empty_documents: int
) -> DatasetFacts:
    """Compare documents before truncation with what will be trained on; without `strategy` nothing is packed."""
    lengths, max_length = column_lengths(tokenized, "input_ids"), args.max_length
    # Only these two paths cut; `bfd_split` and `wrapped` continue a long document in the next row.
    cuts = max_length is not None and strategy in (None, "bfd")
    lost = np.maximum(lengths - int(max_length or 0), 0) if cuts else np.zeros_like(lengths)
    rows = fill = None
    if strategy is not None and max_length:
        rows = len(prepared)
        fill = float(column_lengths(prepared, "input_ids").sum() / (rows * max_length))
    return DatasetFacts(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        empty_documents=empty_documents,
        truncated_documents=int((lost > 0).sum()),
        truncated_tokens=int(lost.sum()),
        longest=int(lengths.max()),
        loss_tokens=counted_tokens(prepared),
        without_loss=WithoutLoss.of(
            tokenized,
            max_length if cuts else None,
            keep_end=strategy is None and args.truncation_mode == "keep_end",
        ),
        padding=null_padding(tokenized),
        rows=rows,
        fill=fill,
    )


def highest_padding_cost(prepared: Dataset, rows_per_batch: int = 1, seed: int = 0) -> float:
    """Return the largest ratio of padded to real tokens, were batches of packed rows unpacked into padded rows.

    1.0 without `seq_lengths`. Rows are drawn together in the random order of `seed`: an estimate for any other.
    """
    if "seq_lengths" not in prepared.column_names or not len(prepared):
        return 1.0
    parts = [
        (pc.list_value_length(chunk).to_numpy(), chunk.flatten().to_numpy())
        for chunk in chunks(prepared, "seq_lengths")
    ]
    documents = np.concatenate([counts for counts, _ in parts])
    lengths = np.concatenate([values for _, values in parts])
    starts = np.cumsum(documents) - documents
    order = np.random.default_rng(seed).permutation(len(documents))
    first = np.arange(0, len(order), rows_per_batch)
    longest = np.maximum.reduceat(np.maximum.reduceat(lengths, starts)[order], first)
    tokens = np.add.reduceat(np.add.reduceat(lengths, starts)[order], first)
    return float((longest * np.add.reduceat(documents[order], first) / tokens).max())
