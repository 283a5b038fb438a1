"""Files of models and checkpoints: what is missing or damaged, and the newest complete checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", *_ADAPTERS, *_INDEX)


def choose_checkpoint(asked: Any, output_dir: str | None) -> tuple[Any, str]:
    """Return the checkpoint to resume from, and a warning if it is not the one that was asked for.

    Args:
        asked: as `Trainer.train` takes it: a folder, or True for the last checkpoint in `output_dir`.

    Raises:
        ValueError: the folder is incomplete, or every checkpoint in `output_dir` is.
    """
    folder = next(iter(_checkpoints(Path(str(output_dir)))), None) if asked is True else asked
    if not isinstance(folder, str | Path) or not Path(folder).is_dir() or not (fault := checkpoint_fault(Path(folder))):
        return asked, ""
    folder = Path(folder)
    others = [*_checkpoints(folder), *_checkpoints(folder.absolute().parent)]
    complete = next((other for other in others if not checkpoint_fault(other)), None)
    if asked is True and complete is not None:
        return str(complete), f"resume: {folder.name} is not complete ({fault}): taking {complete}, the newest that is"
    instead = f"name {str(complete)!r}, the newest that is" if complete else "train from the start, no other one is"
    raise ValueError(f"resume_from_checkpoint: {str(folder)!r} is not a complete checkpoint ({fault}): {instead}")


def newest_checkpoint(output_dir: str | None) -> Path | None:
    """Return the newest complete checkpoint in `output_dir`; None if there is none."""
    return next((folder for folder in _checkpoints(Path(str(output_dir))) if not checkpoint_fault(folder)), None)


def _checkpoints(folder: Path) -> list[Path]:
    named = [child for child in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", child.name)]
    return sorted(filter(Path.is_dir, named), key=lambda child: int(child.name.partition("-")[2]), reverse=True)


def checkpoint_fault(folder: Path) -> str:
    """Return why training cannot resume at `folder`, by the file that transformers writes last and the weights."""
    return file_fault(folder / "trainer_state.json") or weights_fault(folder)


def weights_fault(folder: Path, *, needed: bool = False) -> str:
    """Return the fault of the weights in `folder`, of a model, adapter or checkpoint; empty if there is none.

    Args:
        needed: a folder without weights has a fault too, unless it has files of other names: config.json may name them.
    """
    # An index stands for its shards; a model with several adapters has a folder for each.
    files = [folder / name for name in _WEIGHTS if (folder / name).is_file()][:1]
    files = files or [file for name in _ADAPTERS for file in folder.glob(f"*/{name}")]
    others = {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")}
    if needed and not files and not others - {"training_args.bin"}:
        return f"it holds no weights, such as {_WEIGHTS[0]}"
    for file in files:
        if fault := file_fault(file):
            return fault
        if file.name in _INDEX:
            files += [folder / name for name in sorted(set(json.loads(file.read_text())["weight_map"].values()))]
    return ""


def file_fault(file: Path) -> str:
    """Return whether a JSON object or a file of weights is missing or damaged, by its header; empty if it is whole."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return f"{file.name} is missing"
    with file.open("rb") as opened:
        head = opened.read(64)
    if head.startswith(b"version https://git-lfs"):
        return f"{file.name} is a pointer of git-lfs, not the weights: run `git lfs pull` there"
    try:
        if file.suffix == ".json":
            whole = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):
                whole = True
        else:
            whole = bool(head)
    except (ValueError, RecursionError, SafetensorError):
        whole = False
    return "" if whole else f"{file.name} is cut short or damaged ({file.stat().st_size:,} bytes)"
