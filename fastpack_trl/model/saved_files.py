"""Files of checkpoints and models: a checkpoint that was cut short is named, with the newest complete one."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_STATE = "trainer_state.json"  # the last file of a checkpoint that transformers writes
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_NONE = f"it holds no weights, such as {_SINGLE[0]}"
# What FSDP and DeepSpeed write in the place of weights; only they can read it.
_SHARDED_FOLDERS = ("pytorch_model_fsdp*", "global_step*")


def choose_checkpoint(asked: Any, output_dir: str | None) -> tuple[Any, str]:
    """Return what to resume from, and a sentence for the log where it is not what was asked for.

    Args:
        asked: as `Trainer.train` takes it: a folder, or True for the last checkpoint in `output_dir`.
        output_dir: of the run.

    Raises:
        ValueError: the folder is half written, or every checkpoint in `output_dir` is; names the newest complete one.
    """
    if asked is True:
        found = list(_checkpoints(Path(str(output_dir))))
        fault = checkpoint_fault(found[0]) if found else ""
        if not fault:
            return asked, ""  # also where there is none: transformers says so
        complete = newest_checkpoint(output_dir)
        if complete is None:
            raise ValueError(
                f"resume_from_checkpoint: no checkpoint in output_dir {str(output_dir)!r} is complete "
                f"({found[0].name}: {fault}): train from the start, without resume_from_checkpoint"
            )
        why = f"resume: {found[0].name} is not complete ({fault}): taking {complete}, the newest that is"
        return str(complete), why
    folder = Path(asked) if isinstance(asked, str | Path) else None
    if folder is not None and folder.is_dir() and (fault := checkpoint_fault(folder)):
        others = [*_checkpoints(folder), *_checkpoints(folder.absolute().parent)]
        complete = next((other for other in others if not checkpoint_fault(other)), None)
        instead = f"name {str(complete)!r}, the newest that is" if complete else "no other checkpoint beside it is"
        raise ValueError(f"resume_from_checkpoint {str(asked)!r} is not a complete checkpoint ({fault}): {instead}")
    return asked, ""


def newest_checkpoint(output_dir: str | None) -> Path | None:
    """Return the newest complete checkpoint in `output_dir`; None where there is none."""
    return next((folder for folder in _checkpoints(Path(str(output_dir))) if not checkpoint_fault(folder)), None)


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Yield the folders ``checkpoint-N`` in `folder`, the newest first."""
    named = ((re.fullmatch(r"checkpoint-(\d+)", child.name), child) for child in folder.glob("checkpoint-*"))
    found = {int(match[1]): child for match, child in named if match and child.is_dir()}
    yield from (found[step] for step in sorted(found, reverse=True))


def checkpoint_fault(folder: Path) -> str:
    """Return why training cannot resume at `folder`, e.g. ``"trainer_state.json is missing"``; empty where it can.

    Reads the small files and the headers of the large ones.
    """
    if fault := json_fault(folder / _STATE) or weights_fault(folder):
        return fault
    if (folder / "config.json").is_file() and (fault := json_fault(folder / "config.json")):
        return fault
    if not _weights(folder) and not any(any(folder.glob(name)) for name in _SHARDED_FOLDERS):
        return _NONE
    names = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
    return next(filter(None, (_file_fault(file) for name in names for file in sorted(folder.glob(name)))), "")


def weights_fault(folder: Path, *, needed: bool = False) -> str:
    """Return what is wrong with the weights of a model, adapter or checkpoint in `folder`; empty where nothing is.

    Args:
        needed: that there are none is wrong too; files of other names pass, since config.json may name them.
    """
    found = _weights(folder)
    others = {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")}
    if needed and not found and not others - {"training_args.bin"}:
        return _NONE
    for file in found:
        is_index = file.name in _SHARDED
        if fault := json_fault(file) if is_index else _file_fault(file):
            return fault
        shards = json.loads(file.read_text(encoding="utf-8")).get("weight_map", {}) if is_index else {}
        for name in sorted(set(shards.values())):
            if fault := _file_fault(folder / name):
                return fault
    return ""


def _weights(folder: Path) -> list[Path]:
    """Return the files that transformers reads weights from, an index standing for its shards."""
    for names in (_SINGLE, _ADAPTERS, _SHARDED):
        if found := [folder / name for name in names if (folder / name).is_file()]:
            return found[:1]
    children = (child for child in folder.iterdir() if child.is_dir())  # of a model with several adapters
    return [child / name for child in children for name in _ADAPTERS if (child / name).is_file()]


def json_fault(file: Path) -> str:
    """Return what is wrong with a file that holds one JSON object; empty where nothing is."""
    if not file.is_file():
        return f"{file.name} is missing"
    with suppress(ValueError, RecursionError):  # also bytes that are no text
        if isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
            return ""
    return f"{file.name} is cut short or damaged"


def _file_fault(file: Path) -> str:
    if not file.is_file():
        return f"{file.name} is missing"
    with file.open("rb") as opened:
        head = opened.read(64)
    if not head:
        return f"{file.name} is empty"
    if head.startswith(b"version https://git-lfs"):
        return f"{file.name} is a pointer of git-lfs, not the weights: run `git lfs pull` there"
    whole = True
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError:
            whole = False
    elif head.startswith(b"PK"):  # what torch.save writes; the directory of the archive comes last
        whole = zipfile.is_zipfile(file)
    return "" if whole else f"{file.name} is cut short or damaged ({file.stat().st_size:,} bytes)"
