"""Load training data by name: a hub data set, a local file, a folder of files, or a folder made by `save_to_disk`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import UserError, describe, short_repr
from fastpack_trl.recipe.paths import did_you_mean_path, looks_local, missing_hint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig, ScriptArguments

    Splits = Mapping[str, Dataset | IterableDataset]

BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a data file -> the builder of `datasets.load_dataset` that reads it."""
_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
_MOST_LINES = 1_000_000  # to search: the loader has failed, and the user waits for the reason


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """Load the splits that the arguments name; as in TRL, ``datasets`` takes precedence over ``dataset_name``.

    Raises `UserError` if none are named, if a name leads nowhere, or if a file cannot be read.
    """
    from datasets.exceptions import DatasetsError
    from trl import get_dataset

    check_data_exists(script, mixture)
    if mixture.streaming and mixture.test_split_size is not None:
        raise UserError(f"test_split_size={mixture.test_split_size} needs streaming: false: a stream has no length")
    try:
        if mixture.datasets:
            return get_dataset(replace(mixture, datasets=[_local_entry(entry) for entry in mixture.datasets]))
        return _load_named(str(script.dataset_name), script.dataset_config, script.dataset_streaming)
    except (DatasetsError, ValueError, TypeError, OSError, StopIteration) as error:
        names = _names(script, mixture)
        fault = _first_fault(filter(_is_local, names)) or describe(error.__cause__ or error)
        hint = "".join(did_you_mean_path(name) for name in names if not _is_local(name))
        raise UserError(f"data {short_repr(data_name(script, mixture))} cannot be loaded: {fault}{hint}") from error


def _names(script: ScriptArguments, mixture: DatasetMixtureConfig) -> list[str]:
    return [str(entry.path) for entry in mixture.datasets] or [str(script.dataset_name)]


def data_name(script: ScriptArguments, mixture: DatasetMixtureConfig) -> str:
    """Return the data as the user named them: ``"data.jsonl"``, or ``"a.jsonl, owner/b"`` for a mixture."""
    return ", ".join(_names(script, mixture))


def check_data_exists(script: ScriptArguments, mixture: DatasetMixtureConfig) -> None:
    """Check that data are named and that local ones can be read, without loading them; raise `UserError` if not."""
    if not script.dataset_name and not mixture.datasets:
        raise UserError(
            "no data: set dataset_name (a hub name, a file such as data.jsonl, or a folder) or datasets (a list of "
            "entries with path: ...)"
        )
    for entry in mixture.datasets:
        _local_entry(entry)
    if not mixture.datasets and _is_local(script.dataset_name):
        _local_source(script.dataset_name)


def _builder_of(path: str) -> str | None:
    """Return the builder for a file name: ``"a/b.jsonl.gz"`` -> ``"json"``; None without the suffix of a data file."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1]) if suffixes else None


def _is_local(name: str) -> bool:
    return looks_local(name) or ("://" not in name and _builder_of(name) is not None)


def _local_source(name: str) -> tuple[str, Any]:
    """Return the builder and the ``data_files`` with which `datasets.load_dataset` reads local data.

    ``"data.jsonl"`` -> ``("json", "data.jsonl")``; a folder of files -> ``(folder, None)``; a folder made by
    `save_to_disk` -> ``("arrow", ...)``.
    """
    builder, path = _builder_of(name), Path(name).expanduser()
    if any(mark in name for mark in "*?[") and builder is not None:
        if not any(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))):
            raise UserError(f"no file matches {short_repr(name)} (looked in {Path.cwd()}): correct the pattern")
        return builder, str(path)
    if not path.exists():
        raise UserError(f"data {short_repr(name)} does not exist{missing_hint(name)}")
    if path.is_dir():
        saved = _saved_files(path)
        return ("arrow", saved) if saved else (str(path), None)
    if builder is None:
        raise UserError(
            f"data file {short_repr(name)} has no known suffix: use one of {', '.join(BUILDERS)}, or a folder"
        )
    if path.stat().st_size == 0:
        raise UserError(f"data file {short_repr(name)} is empty: write examples into it, or name another")
    return builder, str(path)


def _saved_files(folder: Path) -> Any:
    """Return the ``data_files`` of a folder made by `save_to_disk`; None for other folders."""
    if (folder / "state.json").is_file():
        return str(folder / "*.arrow")
    if (folder / "dataset_dict.json").is_file():
        return {child.name: str(child / "*.arrow") for child in sorted(folder.iterdir()) if child.is_dir()}
    return None


def _load_named(name: str, config: str | None, streaming: bool) -> Splits:
    import datasets

    path = Path(name).expanduser()
    if path.is_dir() and _saved_files(path):
        # Read in place: the arrow builder would copy the files into the cache.
        loaded = datasets.load_from_disk(str(path))
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else datasets.DatasetDict({"train": loaded})
        return {key: split.to_iterable_dataset() for key, split in splits.items()} if streaming else splits
    source, files = _local_source(name) if _is_local(name) else (name, None)
    return datasets.load_dataset(source, name=config, data_files=files, streaming=streaming)


def _local_entry(entry: Any) -> Any:
    # `path` may also be the name of a builder ("json") beside `data_files`: nothing is left to find.
    if entry.data_files is not None or entry.data_dir is not None or not _is_local(entry.path):
        return entry
    source, data_files = _local_source(entry.path)
    return replace(entry, path=source, data_files=data_files)


def _first_fault(names: Iterable[str]) -> str:
    """Return the first line of a local file of JSON lines that is not a JSON object; empty if none is found."""
    paths = [Path(name).expanduser() for name in names]
    for file in (file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])):
        if file.suffix.lower() not in (".jsonl", ".ndjson") or not file.is_file():
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(islice(lines, _MOST_LINES), 1):
                try:
                    if line.strip() and not isinstance(json.loads(line.decode("utf-8-sig")), dict):
                        return f"{file.name}: line {number} is not a JSON object: write one object per line"
                except (ValueError, RecursionError) as error:
                    return f"{file.name}: line {number} is not one JSON object ({describe(error)})"
    return ""
