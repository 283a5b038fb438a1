"""The first wrong line of a data file that could not be loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_MOST_BYTES = 1 << 29  # of a file are looked at: the loader has failed, and the user waits for the reason
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}


def first_fault(file: Path, builder: str) -> str:
    """Return what is wrong with the first wrong line of `file`, and the remedy; empty if nothing is found.

    ``"line 3 is not one JSON object (Expecting value, column 10): write one object per line"``

    Args:
        file: not compressed.
        builder: of `datasets.load_dataset` that failed to read it: ``json``, ``csv`` or ``text``.
    """
    with file.open("rb") as opened:
        start = opened.read(4)
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it is UTF-16 text: save it as UTF-8, e.g. with `iconv -f UTF-16 -t UTF-8`"
    for number, line in _lines(file):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return (
                f"line {number} is not UTF-8 (byte 0x{line[error.start]:02x}): save the file as UTF-8, e.g. with "
                "`iconv -f LATIN1 -t UTF-8`"
            )
    if builder != "json":
        return ""
    return _of_document(file) if _is_one_document(file) else _of_lines(file)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, numbered from 1."""
    left = _MOST_BYTES
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            left -= len(line)
            if left < 0:
                return
            if line.strip():
                yield number, line


def _is_one_document(file: Path) -> bool:
    """Return True for a JSON array, or an object over several lines in a file not named as JSON lines."""
    first = next(_lines(file), (0, b""))[1].removeprefix(b"\xef\xbb\xbf").strip()
    return first.startswith(b"[") or (file.suffix.lower() == ".json" and first == b"{")


def _of_document(file: Path) -> str:
    try:
        json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        return f"line {error.lineno} is not JSON ({error.msg}, column {error.colno}): correct it"
    except RecursionError:
        return "its values are nested too deep"
    return ""


def _of_lines(file: Path) -> str:
    """Report the first line that is no JSON object, else the first that changes the type of a column."""
    kinds: dict[str, tuple[str, int]] = {}
    changed = ""
    for number, line in _lines(file):
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            said = f"{error.msg}, column {error.colno}"
            return f"line {number} is not one JSON object ({said}): write one object per line"
        except RecursionError:
            return f"line {number} is nested too deep"
        if not isinstance(row, dict):
            return f'line {number} is not a JSON object: write one object per line, e.g. {{"text": "..."}}'
        for column, value in row.items():
            kind = _KINDS.get(type(value), "")
            before, where = kinds.setdefault(column, (kind, number)) if kind else ("", 0)
            if before != kind and not changed:
                changed = (
                    f"column {column!r} holds {kind} in line {number} and {before} in line {where}: give it one type"
                )
    return changed
