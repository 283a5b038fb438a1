"""Training data by name: a hub data set, a local file, a folder of files, or a folder made by `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import UserError, describe, short_repr
from fastpack_trl.recipe.paths import absent, did_you_mean_path, looks_local

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig, ScriptArguments

    Splits = Mapping[str, Dataset | IterableDataset]

BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a data file -> the builder of `datasets.load_dataset` that reads it."""

_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
_MOST_BYTES = 1 << 29  # of a file are looked at: the loader has failed, and the user waits for the reason
_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """Load the splits that the arguments name; as in TRL, ``datasets`` goes before ``dataset_name``.

    Raises `UserError` for none, for nothing at that path or on the hub, and for files that cannot be read.
    """
    from datasets.exceptions import DatasetsError

    from fastpack_trl.model.preflight import unwritable

    check_data_exists(script, mixture)
    try:
        if mixture.datasets:
            return _load_mixture(mixture)
        return _load_named(str(script.dataset_name), script.dataset_config, script.dataset_streaming)
    except UserError:
        raise
    except (DatasetsError, ValueError, OSError, StopIteration) as error:
        from datasets.config import HF_DATASETS_CACHE

        if isinstance(error, OSError) and (reason := unwritable(Path(HF_DATASETS_CACHE))):
            raise UserError(
                f"the cache of data sets, {HF_DATASETS_CACHE}: {reason} with the environment variable HF_HOME"
            ) from error
        names = [str(entry.path) for entry in mixture.datasets] or [str(script.dataset_name)]
        named = data_name(script, mixture)
        raise UserError(f"data {short_repr(named)} cannot be loaded: {_reason(error, names)}") from error


def data_name(script: ScriptArguments, mixture: DatasetMixtureConfig) -> str:
    """Return the data as the user named them: ``"data.jsonl"``, or ``"a.jsonl, owner/b"`` for a mixture."""
    return ", ".join(str(entry.path) for entry in mixture.datasets) or str(script.dataset_name)


def check_data_exists(script: ScriptArguments, mixture: DatasetMixtureConfig) -> None:
    """Check that data are named and that local ones can be read, without loading them; raise `UserError` if not."""
    if not script.dataset_name and not mixture.datasets:
        raise UserError(
            "no data: set dataset_name (a hub name, a file such as data.jsonl, or a folder) or datasets (a list of "
            "entries with path: ...)"
        )
    names = [entry.path for entry in mixture.datasets if entry.data_files is None and entry.data_dir is None]
    for name in names if mixture.datasets else [script.dataset_name]:
        if name is not None and _is_local(name):
            _local_source(name)


def _builder_of(path: str) -> str | None:
    """Return the builder for a file name: ``"a/b.jsonl.gz"`` -> ``"json"``; None without the suffix of a data file."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def _is_local(name: str) -> bool:
    return looks_local(name) or ("://" not in name and _builder_of(name) is not None)


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _local_source(name: str) -> tuple[str, Any]:
    """Return the builder and the ``data_files`` with which `datasets.load_dataset` reads local data.

    ``"data.jsonl"`` -> ``("json", "data.jsonl")``; a folder of files -> ``(folder, None)``; a folder made by
    `save_to_disk` -> ``("arrow", ...)``.
    """
    builder, path = _builder_of(name), Path(name).expanduser()
    if _is_pattern(name) and builder is not None:
        if not _files(name):
            raise UserError(f"no file matches {short_repr(name)} (looked in {Path.cwd()}): correct the pattern")
        return builder, str(path)
    if not path.exists():
        remedy = "relative paths start at the working directory, not at the YAML"
        raise UserError(f"data {short_repr(name)} does not exist{absent(name, remedy)}")
    if path.is_dir():
        saved = _saved_files(path)
        return ("arrow", saved) if saved else (str(path), None)
    if builder is None:
        raise UserError(
            f"data file {short_repr(name)} has no known suffix: use one of {', '.join(BUILDERS)}, or a folder"
        )
    if path.stat().st_size == 0:
        raise UserError(f"data file {short_repr(name)} is empty: write rows into it, or name another")
    return builder, str(path)


def _files(name: str) -> list[Path]:
    """Return the files behind a local name, pattern or folder that have the suffix of a data file."""
    path = Path(name).expanduser()
    found = [path] if path.is_file() else path.rglob("*")
    if _is_pattern(name):
        found = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    return sorted(file for file in found if file.is_file() and _builder_of(str(file)) is not None)


def _saved_files(folder: Path) -> Any:
    """Return the ``data_files`` of a folder made by `save_to_disk`; None for other folders."""
    if (folder / "state.json").is_file():
        return str(folder / "*.arrow")
    if (folder / "dataset_dict.json").is_file():
        return {child.name: str(child / "*.arrow") for child in sorted(folder.iterdir()) if child.is_dir()}
    return None


def _load_named(name: str, config: str | None, streaming: bool) -> Splits:
    import datasets

    if "://" in name and not name.startswith("hf://"):
        raise UserError(
            f"dataset_name {short_repr(name)} is a URL, which has no builder: give it as "
            f"`datasets: [{{path: {_builder_of(name) or 'json'}, data_files: {name}}}]`"
        )
    if not _is_local(name):
        return datasets.load_dataset(name, name=config, streaming=streaming)
    path = Path(name).expanduser()
    if path.is_dir() and _saved_files(path):
        # Read in place: the arrow builder would copy the files into the cache.
        loaded = datasets.load_from_disk(str(path))
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else datasets.DatasetDict({"train": loaded})
        return {key: split.to_iterable_dataset() for key, split in splits.items()} if streaming else splits
    source, data_files = _local_source(name)
    return datasets.load_dataset(source, name=config, data_files=data_files, streaming=streaming)


def _load_mixture(mixture: DatasetMixtureConfig) -> Splits:
    from trl import get_dataset

    if mixture.streaming and mixture.test_split_size is not None:
        raise UserError(
            f"test_split_size={mixture.test_split_size} needs the number of rows, which a stream does not have: remove "
            "it or set streaming: false"
        )
    return get_dataset(replace(mixture, datasets=[_local_entry(entry) for entry in mixture.datasets]))


def _local_entry(entry: Any) -> Any:
    # `path` may also be the name of a builder ("json") beside `data_files`: nothing is left to find.
    if entry.data_files is not None or entry.data_dir is not None or not _is_local(entry.path):
        return entry
    source, data_files = _local_source(entry.path)
    return replace(entry, path=source, data_files=data_files)


def _reason(error: BaseException, names: Sequence[str]) -> str:
    """Return the reason why these data cannot be loaded, with the line if it is in a file."""
    from datasets.data_files import EmptyDatasetError

    for name in names:
        for file in _files(name) if _is_local(name) else ():
            builder = str(_builder_of(str(file)))
            if file.suffix.lower() in BUILDERS and builder != "parquet" and (fault := _first_fault(file, builder)):
                return fault if str(file) == name else f"{file}: {fault}"
    if isinstance(error, StopIteration | EmptyDatasetError) or "corresponds to no data" in str(error):
        what = "data files" if isinstance(error, EmptyDatasetError) else "rows"
        return f"it holds no {what}: put files with rows ({', '.join(BUILDERS)}) there, or name other data"
    # A malformed row arrives as "An error occurred while generating the dataset"; its cause says what and where.
    reason = describe(error.__cause__ or error)
    missing = [name for name in names if not _is_local(name) and "://" not in name]
    if missing:
        where = str(Path(missing[0]).absolute())
        return f"{reason}; nor is there a file or folder {where!r}{did_you_mean_path(missing[0])}"
    return reason


def _first_fault(file: Path, builder: str) -> str:
    """Return what is wrong with the first wrong line of an uncompressed file; empty if nothing is found.

    ``"line 3 is not one JSON object (Expecting value, column 10): write one object per line"``
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
    first = next(_lines(file), (0, b""))[1].removeprefix(b"\xef\xbb\xbf").strip()
    # An array, or an object over several lines in a file not named as JSON lines.
    whole = first.startswith(b"[") or (file.suffix.lower() == ".json" and first == b"{")
    return _fault_of_document(file) if whole else _fault_of_rows(file)


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


def _fault_of_document(file: Path) -> str:
    try:
        json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        return f"line {error.lineno} is not JSON ({error.msg}, column {error.colno}): correct it"
    except RecursionError:
        return "its values are nested too deep"
    return ""


def _fault_of_rows(file: Path) -> str:
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
