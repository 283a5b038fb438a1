"""Load training data by name: a hub data set, a local file, a folder of files, or a folder made by `save_to_disk`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import UserError, check_counts, describe, short_repr
from fastpack_trl.packing.columns import column_fault
from fastpack_trl.recipe.formats import AS_IS
from fastpack_trl.recipe.methods import Method
from fastpack_trl.recipe.paths import looks_local, missing_hint, model_folder

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl import DatasetMixtureConfig, ScriptArguments

    Splits = Mapping[str, Dataset | IterableDataset]

logger = logging.getLogger(__name__)
BUILDERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a data file -> the builder of `datasets.load_dataset` that reads it."""
_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
_MOST_LINES = 1_000_000  # to search: the loader has failed, and the user waits for the reason


def check_early(method: Method, options: Any) -> None:
    """Raise `ValueError` for fields, local paths and columns of a JSON file that are wrong; imports nothing heavy."""
    check_counts(options)
    method.settings(**{own.name: getattr(options, own.name) for own in fields(method.settings)})
    if options.model_name_or_path:
        model_folder("model_name_or_path", options.model_name_or_path)
    template = getattr(options, "chat_template_path", None) or ""
    resume = str(options.resume_from_checkpoint or "")
    if (looks_local(template) or template.endswith((".jinja", ".j2"))) and not Path(template).exists():
        raise UserError(f"chat_template_path {short_repr(template)} does not exist{missing_hint(template)}")
    if resume.lower() not in ("", "true", "false") and not Path(resume, "trainer_state.json").is_file():
        lacks = "a complete checkpoint (trainer_state.json is missing)" if Path(resume).is_dir() else "a folder"
        raise UserError(f"resume_from_checkpoint={resume!r} is not {lacks}: pass a checkpoint, or true for the newest")
    (builder, file), row = source_of("" if options.datasets else options.dataset_name or ""), None
    if builder == "json" and options.dataset_format == AS_IS and not getattr(options, "dataset_kwargs", None):
        with suppress(OSError, ValueError, RecursionError), Path(file).open(encoding="utf-8-sig") as lines:
            row = json.loads(lines.readline(1 << 20))  # fails if a row takes several lines, or a very long one
    if isinstance(row, dict):
        images = row["images"] if isinstance(row.get("images"), list) else []
        files = [each for each in images if isinstance(each, str) and "." in each and ":" not in each]  # no URLs
        lost = [f"image {each!r} does not exist{missing_hint(each)}" for each in files if not Path(each).is_file()]
        if fault := column_fault(row, "train", method.command, options) or "".join(lost[:1]):
            raise UserError(f"data {short_repr(options.dataset_name)}: {fault}")


def load_data(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """Load the splits that the arguments name; as in TRL, ``datasets`` takes precedence over ``dataset_name``.

    Raises `UserError` if none are named, if a name leads nowhere, or if a file cannot be read.
    """
    from datasets.exceptions import DatasetsError
    from trl import get_dataset

    names = _names(script, mixture)
    if not all(names):
        named = "dataset_name (a hub name, a file such as data.jsonl, or a folder)"
        raise UserError(f"no data: set {named} or datasets (a list of entries with path: ...)")
    if mixture.streaming and mixture.test_split_size is not None:
        raise UserError(f"test_split_size={mixture.test_split_size} needs streaming: false: a stream has no length")
    entries = [_local_entry(entry) for entry in mixture.datasets]
    source = None if entries else source_of(names[0])
    try:
        if source is None:
            if script.dataset_name:
                logger.warning(f"dataset_name={short_repr(script.dataset_name)} is not read, because `datasets` is set")
            return _divided(get_dataset(replace(mixture, datasets=entries, test_split_size=None)), mixture)
        return _load_named(names[0], *source, script.dataset_config, script.dataset_streaming)
    except (DatasetsError, ValueError, TypeError, OSError, StopIteration, IndexError) as error:
        cause, files = error.__cause__ or error, [file for name in names for file in _files(name)]
        lost = [name for name in names if not Path(name).expanduser().exists() and name not in BUILDERS.values()]
        hub = "".join(f"no such folder{missing_hint(name)}, and on the hub: " for name in lost if not files)
        fault, empty = _first_fault(files) or hub + describe(cause), [file for file in files if not file.stat().st_size]
        if empty or isinstance(cause, StopIteration | IndexError) or "corresponds to no data" in str(cause):
            fault = f"{', '.join(file.name for file in empty) or 'it'} holds no rows"
        raise UserError(f"data {short_repr(data_name(script, mixture))} cannot be loaded: {fault}") from error


def _divided(splits: Any, mixture: DatasetMixtureConfig) -> Splits:
    """Take ``test_split_size``, a share or rows, out of the data: the same in each process and in a resumed run."""
    size: float | None = mixture.test_split_size
    if size is None:
        return splits
    return splits["train"].train_test_split(size if size < 1 else int(size), seed=0)


def _names(script: ScriptArguments, mixture: DatasetMixtureConfig) -> list[str]:
    return [str(entry.path) for entry in mixture.datasets] or [script.dataset_name or ""]


def data_name(script: ScriptArguments, mixture: DatasetMixtureConfig) -> str:
    """Return the data as the user named them: ``"data.jsonl"``, or ``"a.jsonl, owner/b"`` for a mixture."""
    return ", ".join(_names(script, mixture))


def source_of(name: str) -> tuple[str, Any]:
    """Return the path and the ``data_files`` with which `datasets.load_dataset` reads data.

    ``"data.jsonl"`` -> ``("json", "data.jsonl")``; a folder of files, or a hub name -> ``(folder, None)``; a folder
    made by `save_to_disk` -> ``("arrow", ...)``.
    """
    path, builder = Path(name).expanduser(), _builder(Path(name))
    if "://" in name or not (looks_local(name) or builder):
        return name, None
    if path.is_dir():
        saved = _saved_files(path)
        return ("arrow", saved) if saved else (str(path), None)
    if not path.exists() and not any(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))):
        raise UserError(f"data {short_repr(name)} does not exist{missing_hint(name)}")
    if builder is None:
        raise UserError(f"data file {short_repr(name)} must end in one of {', '.join(BUILDERS)}, or be a folder")
    return builder, str(path)


def _builder(file: Path) -> str | None:
    plain = file.with_suffix("") if file.suffix.lower() in _COMPRESSIONS else file
    return BUILDERS.get(plain.suffix.lower())


def _saved_files(folder: Path) -> Any:
    """Return the ``data_files`` of a folder made by `save_to_disk`; None for other folders."""
    if (folder / "state.json").is_file():
        return str(folder / "*.arrow")
    if (folder / "dataset_dict.json").is_file():
        return {child.name: str(child / "*.arrow") for child in sorted(folder.iterdir()) if child.is_dir()}
    return None


def _load_named(name: str, source: str, files: Any, config: str | None, streaming: bool) -> Splits:
    import datasets

    if source != "arrow" or files is None:
        return datasets.load_dataset(source, name=config, data_files=files, streaming=streaming)
    # Read in place: the arrow builder would copy the files into the cache.
    loaded = datasets.load_from_disk(str(Path(name).expanduser()))
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else datasets.DatasetDict({"train": loaded})
    return {key: split.to_iterable_dataset() for key, split in splits.items()} if streaming else splits


def _local_entry(entry: Any) -> Any:
    if entry.data_files is not None or entry.data_dir is not None:
        return entry  # `path` may also be the name of a builder ("json")
    source, data_files = source_of(entry.path)
    return replace(entry, path=source, data_files=data_files)


def _files(name: str) -> list[Path]:
    """Return the local data files that a path, a folder or a pattern names."""
    path = Path(name).expanduser()
    found = [path] if path.exists() else Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
    return sorted(file for one in found for file in (one, *one.rglob("*")) if file.is_file() and _builder(file))


def _first_fault(files: Iterable[Path]) -> str:
    """Return the first line of files of JSON lines that is not a JSON object; empty if none is found."""
    import fsspec

    for file in (file for file in files if _builder(file) == "json"):
        with suppress(OSError, EOFError), fsspec.open(str(file), "rb", compression="infer") as lines:
            for number, line in enumerate(islice(lines, _MOST_LINES), 1):
                where = f"{file.name}: line {number} is not"
                try:
                    if line.strip() and not isinstance(json.loads(line.decode("utf-8-sig")), dict):
                        return f"{where} a JSON object: write one object per line"
                except (ValueError, RecursionError) as error:
                    if number == 1 and ".json" in file.suffixes:
                        break  # one value over many lines
                    # JSON's own message counts lines too, and each of ours is its first.
                    return f"{where} one JSON object ({describe(error).replace('line 1 ', '').partition(' (char')[0]})"
    return ""
