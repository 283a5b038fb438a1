"""Load training data by name: a hub data set, a local file, a folder of files, or a folder made by `save_to_disk`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """Load the splits that the arguments name; as in TRL, ``datasets`` takes precedence over ``dataset_name``.

    Raises `UserError` if none are named, if a name leads nowhere, or if a file cannot be read.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError
    from trl import get_dataset

    names = _names(script, mixture)
    if not all(names):
        raise UserError(
            "no data: set dataset_name (a hub name, a file such as data.jsonl, or a folder) or datasets (a list of "
            "entries with path: ...)"
        )
    if mixture.streaming and mixture.test_split_size is not None:
        raise UserError(f"test_split_size={mixture.test_split_size} needs streaming: false: a stream has no length")
    # With files or a folder of its own, the path of an entry may be the name of a builder ("json").
    entries = [
        entry if entry.data_files or entry.data_dir else replace(entry, **_source(str(entry.path)))
        for entry in mixture.datasets
    ]
    source = {} if entries else _source(names[0])
    try:
        if entries:
            return get_dataset(replace(mixture, datasets=entries))
        return load_dataset(**source, name=script.dataset_config, streaming=script.dataset_streaming)
    except (DatasetsError, ValueError, TypeError, OSError, StopIteration) as error:
        hint = "".join(did_you_mean_path(name) for name in names if not Path(name).expanduser().exists())
        shown, fault = short_repr(data_name(script, mixture)), describe(error.__cause__ or error)
        raise UserError(f"data {shown} cannot be loaded: {fault}{hint}") from error


def _names(script: ScriptArguments, mixture: DatasetMixtureConfig) -> list[str]:
    return [str(entry.path) for entry in mixture.datasets] or [script.dataset_name or ""]


def data_name(script: ScriptArguments, mixture: DatasetMixtureConfig) -> str:
    """Return the data as the user named them: ``"data.jsonl"``, or ``"a.jsonl, owner/b"`` for a mixture."""
    return ", ".join(_names(script, mixture))


def _source(name: str) -> dict[str, Any]:
    """Return the keywords with which `datasets.load_dataset` reads data.

    ``"data.jsonl"`` -> ``{"path": "json", "data_files": "data.jsonl"}``; a folder of files, or a hub name -> its path
    alone; a folder made by `save_to_disk` -> the builder ``arrow`` and the files of each split.
    """
    suffixes, path = [suffix.lower() for suffix in Path(name).suffixes], Path(name).expanduser()
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if "://" in name or not (looks_local(name) or builder):
        return {"path": name}
    if (path / "state.json").is_file():
        return {"path": "arrow", "data_files": str(path / "*.arrow")}
    if (path / "dataset_dict.json").is_file():
        parts = [state.parent for state in sorted(path.glob("*/state.json"))]
        return {"path": "arrow", "data_files": {part.name: str(part / "*.arrow") for part in parts}}
    if path.is_dir():
        return {"path": str(path)}
    if not path.exists() and not any(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))):
        raise UserError(f"data {short_repr(name)} does not exist{missing_hint(name)}")
    if builder is None:
        raise UserError(
            f"data file {short_repr(name)} has no known suffix: use one of {', '.join(BUILDERS)}, or a folder"
        )
    return {"path": builder, "data_files": str(path)}
