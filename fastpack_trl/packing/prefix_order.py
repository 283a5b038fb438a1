"""`packing_order="prefix"`: documents that begin alike are packed into the same rows.

TRL sorts documents by length before it packs them, so that what begins alike lies in rows far apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List

from fastpack_trl.packing.packed_inputs import IntArray
from fastpack_trl.packing.prefixes import LEAST_SHARED, first_hashes, neighbours

_CHUNK = 1 << 26
"""Tokens of rows that are written at once: lists of them have offsets of 32 bits."""
_MOST_DOCUMENTS, _SAMPLED = 1_000_000, 2_000_000
"""Documents of a data set above which it is not looked through, and tokens of those that are compared."""


def pack_by_prefix(documents: Dataset, max_length: int, *, split: bool) -> Dataset:
    """Return rows of at most `max_length` tokens: documents in the order of their tokens, one row after the other.

    Documents ``[5, 6, 1]``, ``[7]`` and ``[5, 6, 2]`` in rows of 6 tokens: ``[[5, 6, 1, 5, 6, 2], [7]]``. All of it is
    in memory, rows too: some 24 bytes per token while it is sorted.

    Args:
        documents: with ``input_ids``, and ``labels`` of the same length or none; other columns are dropped, as by TRL.
        max_length: tokens of a row.
        split: longer documents go on as further ones, as of ``packing_strategy="bfd_split"``; else they are cut.

    Returns:
        These columns, and ``seq_lengths``, as of `trl.pack_dataset`.
    """
    # Others may be lists too, with items of their own: the messages of a conversation.
    names = [name for name in ("input_ids", "labels") if name in documents.features]
    table = documents.select_columns(names).with_format("arrow")[:]
    columns = {name: _flat(table.column(name)) for name in names}
    ids, offsets = columns["input_ids"]
    starts, lengths = _pieces(offsets[:-1], np.diff(offsets), max_length, split=split)
    text = ids.astype(">u4").tobytes()  # big-endian bytes compare as the tokens do
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    keys = [text[4 * start : 4 * (start + length)] for start, length in spans]
    order: IntArray = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    del text, keys
    starts, lengths = starts[order], lengths[order]
    packed: dict[str, list[pa.Array]] = {name: [] for name in (*names, "seq_lengths")}
    for rows in _in_chunks(_filled(lengths, max_length), max(1, _CHUNK // max_length)):
        here = slice(rows[0], rows[-1])
        ends = lengths[here].cumsum()
        tokens = np.arange(int(ends[-1])) + (starts[here] - (ends - lengths[here])).repeat(lengths[here])
        bounds = pa.array(np.append(0, ends[rows[1:] - rows[0] - 1]).astype(np.int32))
        for name, (values, _) in columns.items():
            packed[name].append(pa.ListArray.from_arrays(bounds, pa.array(values[tokens])))
        of_documents = pa.array((rows - rows[0]).astype(np.int32))
        packed["seq_lengths"].append(pa.ListArray.from_arrays(of_documents, pa.array(lengths[here])))
    types = {name: List(documents.features[name].feature) for name in names}
    made = Dataset(pa.table({name: pa.chunked_array(arrays) for name, arrays in packed.items()}))
    return made.cast(type(documents.features)({**types, "seq_lengths": List(made.features["seq_lengths"].feature)}))


def computed_by_prefix(rows: Dataset, max_length: int) -> float | None:
    """Return the share of the documents' tokens that is left where `pack_by_prefix` has packed them; None: too many.

    Documents of a sample are compared: those of which the hash of the first tokens is one of some, so that what begins
    alike is in it together or not at all.

    Args:
        rows: packed, with ``input_ids`` and ``seq_lengths``.
        max_length: tokens of a row.
    """
    table = rows.select_columns(["input_ids", "seq_lengths"]).with_format("arrow")[:]
    tokens, documents = (pc.sum(pc.list_value_length(column)).as_py() or 0 for column in table.columns)
    if not 1 < documents <= _MOST_DOCUMENTS:
        return None
    groups = max(1, tokens // _SAMPLED)
    pieces: list[Any] = []
    sampled = compared = 0
    for batch in table.to_batches():
        ids, sizes = (column.flatten().to_numpy(zero_copy_only=False) for column in batch.columns)
        ends = sizes.cumsum()
        enough, hashes = first_hashes(ids, ends - sizes, sizes, LEAST_SHARED)
        compared += int(sizes[enough].sum())  # the others are too short to share anything
        for place in enough[hashes.astype(np.uint64) % groups == 0].tolist():
            if sampled >= 2 * _SAMPLED:  # one beginning may be all there is: the rest is like these
                break
            pieces.append(ids[ends[place] - sizes[place] : ends[place]])
            sampled += len(pieces[-1])
    if len(pieces) < 2:
        return 1.0
    lengths: IntArray = np.array([len(piece) for piece in pieces], dtype=np.int64)
    order, common = neighbours(np.concatenate(pieces), lengths.cumsum() - lengths, lengths)
    common[common < LEAST_SHARED] = 0
    common[_filled(lengths[order], max_length)[:-1]] = 0  # nothing is before the first of a row
    return 1.0 - float(common.sum()) / sampled * compared / tokens


def _flat(column: pa.ChunkedArray) -> tuple[Any, IntArray]:
    """Return the values of a list column, and where each row of it begins and ends."""
    lists = [chunk for chunk in column.chunks if len(chunk)]
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in lists]
    lengths = [np.diff(chunk.offsets.to_numpy()).astype(np.int64) for chunk in lists]
    return np.concatenate(values), np.append(0, np.concatenate(lengths).cumsum())


def _in_chunks(rows: IntArray, count: int) -> Iterator[IntArray]:
    """Yield the bounds of at most `count` rows at a time: ``[0, 2, 5, 6], 2`` -> ``[0, 2, 5]``, ``[5, 6]``."""
    for first in range(0, len(rows) - 1, count):
        yield rows[first : first + count + 1]


def _pieces(starts: IntArray, lengths: IntArray, most: int, *, split: bool) -> tuple[IntArray, IntArray]:
    """Return where documents that fit into a row begin, and their lengths; empty ones are left out."""
    if not split:
        kept = lengths > 0
        return starts[kept], np.minimum(lengths[kept], most)
    count: IntArray = -(-lengths // most)
    place = np.arange(int(count.sum())) - (count.cumsum() - count).repeat(count)
    return starts.repeat(count) + place * most, np.minimum(lengths.repeat(count) - place * most, most)


def _filled(lengths: IntArray, most: int) -> IntArray:
    """Return the first document of each row, and the number of documents: each row takes what fits, in order."""
    bounds, tokens = [0], 0
    for place, length in enumerate(lengths.tolist()):
        if tokens + length > most:
            bounds.append(place)
            tokens = 0
        tokens += length
    return np.array([*bounds, len(lengths)], dtype=np.int64)
