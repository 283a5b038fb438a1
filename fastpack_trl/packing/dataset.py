"""Facts and checks of data sets around TRL's own preparation, read from Arrow some rows at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, LargeList, List
from numpy.typing import NDArray

from fastpack_trl.errors import DataError
from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.packing.shared_keys import Ints

_ROWS_AT_A_TIME = 10_000
_NEVER = 2**62
_READ = ("input_ids", "labels", "seq_lengths")
"""Columns that TRL reads: the last with `padding_free` only, so that truncation leaves it stale."""

Piece = Mapping[str, tuple[Ints, Any]]
"""Of each list column: its items per row, and the items of these rows as one Arrow array."""


def pieces(dataset: Dataset, *columns: str) -> Iterator[Piece]:
    """Yield list columns, those of `columns` that are there, some rows at a time: they may not fit into memory."""
    names = [name for name in columns if name in dataset.column_names]
    view = dataset.select_columns(names)
    view.set_format("arrow")  # in place: `with_format` copies the data set's description once more
    for table in view.iter(batch_size=_ROWS_AT_A_TIME):
        # A filtered data set has a chunk per row.
        arrays = {name: c.chunk(0) if (c := table[name]).num_chunks == 1 else c.combine_chunks() for name in names}
        counts = {name: pc.fill_null(pc.list_value_length(array), 0).to_numpy() for name, array in arrays.items()}
        yield {name: (counts[name].astype(np.int64), array.flatten()) for name, array in arrays.items()}


def column_lengths(dataset: Dataset, column: str) -> Ints:
    """Return the items per row of a list column, in the data set's order."""
    return np.concatenate([np.zeros(0, np.int64), *(piece[column][0] for piece in pieces(dataset, column))])


def is_integer_list(kind: Any) -> bool:
    """Return whether a column of this type holds a list of integers per row; lists that are all empty are such."""
    inner = str(getattr(kind.feature, "dtype", "")) if isinstance(kind, List | LargeList) else ""
    return inner.startswith(("int", "uint", "null"))


def is_token_lists(dataset: Dataset, columns: Sequence[str]) -> bool:
    """Return whether there are `input_ids`, and each of `columns` that the data set has lists integers per row."""
    types = {name: dataset.features[name] for name in columns if name in dataset.column_names}
    return "input_ids" in types and all(map(is_integer_list, types.values()))


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """A map-style data set before and after preparation."""

    longest: int
    """Tokens of the longest document: the `max_length` that truncates nothing."""
    truncated_tokens: int
    fill: float | None
    """Share of the packed rows' capacity (rows x max_length) that holds tokens; None if nothing is packed."""
    figures: Mapping[str, Any]
    """Values for the report."""


def prepare_in_two_passes(
    prepare: Callable[..., Any], dataset: Dataset | IterableDataset, processing_class: Any, args: Any, packing: bool,
    formatting_func: Any, name: str, *, count: bool,
) -> tuple[Any, DatasetFacts | None]:  # fmt: skip
    """Tokenize, then truncate or pack, each by TRL's own preparation.

    Args:
        prepare: `SFTTrainer._prepare_dataset`, bound; its arguments follow.
        dataset: a data set; one that is streamed, transformed or empty cannot be read before, and is prepared at once.
        count: return facts too if examples are token lists, and raise if nothing of them is left to train on.

    Raises:
        DataError: labels of another length than the tokens, no token, or none left.
    """
    if isinstance(dataset, IterableDataset) or dataset.format["type"] == "custom" or not len(dataset):
        return prepare(dataset, processing_class, args, packing, formatting_func, name), None
    whole = copy.copy(args)
    whole.max_length, whole.shuffle_dataset = None, False
    documents = prepare(dataset, processing_class, whole, False, formatting_func, name)
    if "input_ids" not in documents.column_names:
        raise ValueError(f"the {name} data set has no input_ids after its preparation: check its first row")
    tokenized, empty = is_token_lists(documents, ("input_ids", "labels")), 0
    if tokenized:
        lengths = column_lengths(documents, "input_ids")
        labels = column_lengths(documents, "labels") if "labels" in documents.column_names else lengths
        wrong = np.flatnonzero(labels != lengths)
        if wrong.size:
            row = wrong[0]
            problem = f"row {row} of the {name} data set has {labels[row]} labels for {lengths[row]} input_ids"
            raise DataError(f"{problem}: give one label per token, {IGNORE_INDEX} where no loss is counted")
        empty = int((lengths == 0).sum())
        if empty == len(lengths):
            raise DataError(f"the {name} data set has no token: all {empty} documents are empty")
        documents = documents.select(np.flatnonzero(lengths)) if empty else documents
    prepared = prepare(documents, processing_class, args, packing, None, name)
    if not (count and tokenized):
        return prepared, None
    return prepared, _measure(documents, prepared, args, args.packing_strategy if packing else None, empty)


def _measure(documents: Dataset, prepared: Dataset, args: Any, strategy: str | None, empty: int) -> DatasetFacts:
    """Compare documents before truncation with the prepared examples; raise `DataError` if nothing is left of them."""
    max_length, lengths = args.max_length, column_lengths(documents, "input_ids")
    longest, tokens = int(lengths.max()), int(lengths.sum())
    if not len(prepared):
        if not counted_tokens(documents, padding_free=False):
            why = f"all labels are {IGNORE_INDEX}; give labels, or completions that are not empty"
            raise DataError(f"the train data set has no token that the loss counts: {why}")
        why = f"max_length={max_length} cuts every completion off; the longest document has {longest:,} tokens"
        raise DataError(f"no example of the train data set is left: {why}: raise max_length, or shorten the prompts")
    if not counted_tokens(prepared) and counted_tokens(documents):
        fix = f"raise max_length, the longest document has {longest:,} tokens"
        raise DataError(f"max_length={max_length} leaves the train data set no token that the loss counts: {fix}")
    # Only these two cut; `bfd_split` and `wrapped` continue a long document in the next row.
    limit = max_length if max_length is not None and strategy in (None, "bfd") else _NEVER - 1
    lost = np.maximum(lengths - limit, 0)
    packed = strategy is not None and bool(max_length)
    fill = column_lengths(prepared, "input_ids").sum() / (len(prepared) * max_length) if packed else 0.0
    needed, padding = _read_labels(documents, keep_end=strategy is None and args.truncation_mode == "keep_end")
    cut, never = needed[(needed > limit) & (needed < _NEVER)], int((needed == _NEVER).sum())
    unscored = {
        f"{len(cut):,} after truncation: max_length={cut.max(initial=0)} keeps at least one in each": len(cut),
        f"{never:,} before truncation (labels are all {IGNORE_INDEX}, or one token alone): drop them": never,
    }
    cuts = f"none (longest document {longest:,} tokens, max_length {max_length})"
    if lost.any():
        cuts = f"{lost.sum():,} tokens ({lost.sum() / tokens:.1%}) of {(lost > 0).sum():,} documents cut by "
        cuts += f"max_length={max_length}; max_length={longest}"
        cuts += " or packing_strategy='bfd_split' keeps them" if packed else " keeps them"
    masked = f"{padding:,} tokens with attention_mask 0, a column that TRL does not read"
    nothing = "none: no token of this data set is counted by the loss, nothing will be learnt"
    table: list[tuple[str, object, object]] = [
        ("documents", True, f"{len(lengths):,} ({tokens:,} tokens)"),
        ("skipped empty documents", empty, empty),
        ("packing fill", packed, f"{fill:.1%} of {len(prepared):,} rows x {max_length or 0:,} tokens"),
        ("truncated tokens", True, cuts),
        ("documents without loss tokens", any(unscored.values()), "; ".join(filter(unscored.get, unscored))),
        ("padding trained on", padding, f"{masked}: remove them, or set their labels to {IGNORE_INDEX}"),
        ("loss tokens", not counted_tokens(prepared, padding_free=args.padding_free or packed), nothing),
    ]
    figures = {name: text for name, applies, text in table if applies}
    return DatasetFacts(longest, int(lost.sum()), float(fill) if packed else None, figures)


def _read_labels(documents: Dataset, *, keep_end: bool) -> tuple[Ints, int]:
    """Return what each labelled document needs for a loss (`_needed`), and the tokens of the loss that are masked."""
    masks = ["attention_mask"] if is_integer_list(documents.features.get("attention_mask")) else []
    needed: list[Ints] = [np.zeros(0, np.int64)]
    padding = 0
    for piece in pieces(documents, "input_ids", "labels", *masks):
        lengths, labels = piece.get("labels", piece["input_ids"])
        counted = _not_ignored(labels)
        if "labels" in piece:
            needed.append(_needed(lengths, counted, keep_end))
        for _, mask in (piece[name] for name in masks):
            if len(mask) == len(counted):
                padding += int((counted & (mask.to_numpy(zero_copy_only=False) == 0)).sum())
    return np.concatenate(needed), padding


def _needed(lengths: Ints, counted: NDArray[np.bool_], keep_end: bool) -> Ints:
    """Return, of each document, the tokens that must stay for the loss to count one; `_NEVER` if it counts none.

    Truncation keeps the first tokens, or the last ones if `keep_end`. The first token of a document has no prediction.
    """
    starts = lengths.cumsum() - lengths
    inside = np.arange(len(counted)) - starts.repeat(lengths)
    kept = (lengths.repeat(lengths) - inside if keep_end else inside) + 1
    return np.minimum.reduceat(np.where(counted & (inside > 0), kept, _NEVER), starts)


def _not_ignored(labels: Any) -> NDArray[np.bool_]:
    return np.array(pc.fill_null(pc.not_equal(labels, IGNORE_INDEX), False).to_numpy(zero_copy_only=False))


def _counted(piece: Piece) -> NDArray[np.bool_]:
    """Return which labels, or tokens without labels, a loss counts: not ignored, and not the first of a document."""
    rows, labels = piece.get("labels", piece["input_ids"])
    counted, lengths = _not_ignored(labels), piece["seq_lengths"][1].to_numpy() if "seq_lengths" in piece else rows
    starts = (lengths.cumsum() - lengths)[lengths > 0]
    counted[starts[starts < len(counted)]] = False  # the collator names lengths that exceed their row
    return counted


def counted_tokens(dataset: Dataset, *, padding_free: bool = True) -> int:
    """Count the tokens of the loss, the first of each document left out: of each row, without `padding_free`."""
    return sum(int(_counted(piece).sum()) for piece in pieces(dataset, *_READ[: 2 + padding_free]))


def check_vocabulary(dataset: Dataset, vocab_size: int, *, padding_free: bool) -> None:
    """Raise `DataError` for a token id, or a label that may be counted, outside [0, vocab_size)."""
    for piece in pieces(dataset, *_READ[: 2 + padding_free]):
        ids = {"input_ids": piece["input_ids"][1]}
        if "labels" in piece:
            ids["labels"] = piece["labels"][1].filter(pa.array(_counted(piece)))
        for column, values in ids.items():
            for value in pc.min_max(values).as_py().values():
                if value is not None and not 0 <= value < vocab_size:
                    raise DataError(
                        f"the train data set has {int(value)} in {column!r}, outside the model's vocabulary of "
                        f"{vocab_size}: tokenize it with the model's own tokenizer, or resize the model's embeddings"
                    )


def padding_cost(prepared: Dataset) -> float:
    """Return padded tokens per token if the documents of each packed row are padded to the longest of them."""
    padded = tokens = 0
    for piece in pieces(prepared, "seq_lengths") if "seq_lengths" in prepared.column_names else ():
        documents, lengths = piece["seq_lengths"][0], piece["seq_lengths"][1].to_numpy()
        padded += int((documents * np.maximum.reduceat(lengths, documents.cumsum() - documents)).sum())
        tokens += int(lengths.sum())
    return padded / tokens if tokens else 1.0
