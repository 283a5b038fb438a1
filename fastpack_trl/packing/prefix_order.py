"""`packing_order="prefix"`: documents that begin alike are packed into the same rows.

TRL sorts documents by length before it packs them, so that what begins alike lies in rows far apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, List

from fastpack_trl.packing.packed_inputs import IntArray


def pack_by_prefix(documents: Dataset, max_length: int, *, split: bool) -> Dataset:
    """Return rows of at most `max_length` tokens: documents in the order of their tokens, one row after the other.

    Documents ``[5, 6, 1]``, ``[7]`` and ``[5, 6, 2]`` in rows of 6 tokens: ``[[5, 6, 1, 5, 6, 2], [7]]``.

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
    text, first = ids.astype(">u4").tobytes(), int(offsets[0])
    # Big-endian bytes compare as the tokens do.
    spans = zip((starts - first).tolist(), lengths.tolist(), strict=True)
    keys = [text[4 * start : 4 * (start + length)] for start, length in spans]
    order: IntArray = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    starts, lengths = starts[order], lengths[order]
    rows = _filled(lengths, max_length)
    ends = lengths.cumsum()
    tokens = np.arange(int(ends[-1])) + (starts - first - (ends - lengths)).repeat(lengths)
    of_rows: IntArray = np.append(0, ends[rows[1:] - 1])
    packed: dict[str, Any] = {
        name: pa.LargeListArray.from_arrays(of_rows, pa.array(values[tokens])) for name, (values, _) in columns.items()
    }
    packed["seq_lengths"] = pa.LargeListArray.from_arrays(rows, pa.array(lengths))
    types = {name: List(documents.features[name].feature) for name in names}
    made = Dataset(pa.table(packed))
    return made.cast(type(documents.features)({**types, "seq_lengths": List(made.features["seq_lengths"].feature)}))


def _flat(column: pa.ChunkedArray) -> tuple[Any, IntArray]:
    """Return the values of a list column, and where each row of it begins and ends."""
    chunk = column.combine_chunks()
    chunk = chunk.chunk(0) if isinstance(chunk, pa.ChunkedArray) else chunk
    return chunk.flatten().to_numpy(zero_copy_only=False), np.append(0, np.diff(chunk.offsets.to_numpy()).cumsum())


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
