"""Checks before a trainer prepares anything: arguments, the output folder, saved files."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fastpack_trl.errors import check_counts, first_reason

_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("adapter_model.safetensors", "adapter_model.bin"),
)
"""Files of which libraries load the first that exists."""
_STATES = (
    *("config.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("pytorch_model_fsdp.bin", "*/adapter_model.*", "global_step*/*.pt"),
)
_SHARDED = ("pytorch_model_fsdp_[0-9]", "optimizer_[0-9]")
_NO_WEIGHTS = "it holds no weights, such as model.safetensors"


def bound(stock: type, trainer: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer of TRL by name; a `TypeError` names the place of a field of its config."""
    signature = inspect.signature(stock.__init__)  # type: ignore[misc]
    try:
        return signature.bind(trainer, *args, **kwargs).arguments
    except TypeError as error:
        fields = ("max_seq_length", *getattr(kwargs.get("args"), "__dataclass_fields__", ()))
        instead = dict.fromkeys(fields, "args=, a field of its config") | {"tokenizer": "processing_class="}
        for name in instead.keys() & (kwargs.keys() - signature.parameters):
            raise TypeError(f"{stock.__name__} has no argument {name!r}: give it as {instead[name]}") from error
        raise


def check_given(given: Mapping[str, Any]) -> None:
    """Check the arguments of `SFTTrainer`, by name, before TRL loads the model and prepares the data."""
    args, model = given.get("args"), given.get("model")
    if args is not None:
        check_counts(args)
        check_output_dir(args)
    if isinstance(model, PreTrainedModel) and not model.can_generate():
        raise ValueError(f"model={type(model).__name__} cannot generate: load an AutoModelForCausalLM")
    check_adapters(model, args)
    if isinstance(model, str):
        check_weights(model)


def check_adapters(model: Any, args: Any) -> None:
    """Raise `ValueError` if a run would save adapters that transformers loaded and the installed PEFT cannot save.

    transformers 5.24 raises for PEFT before 0.22 when it saves, after the steps up to there.
    """
    saves = args is None or args.save_strategy != "no"
    if not saves or not isinstance(model, PreTrainedModel) or not getattr(model, "_hf_peft_config_loaded", False):
        return
    try:
        model.active_adapters()
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"the adapter in {type(model).__name__} cannot be saved with the installed versions ({error}): load the "
            "base model, and give the trainer PeftModel.from_pretrained(base, adapter, is_trainable=True)"
        ) from error


def check_output_dir(args: Any) -> None:
    """Raise `ValueError` unless `output_dir` can be made and, in a run that saves, written to."""
    folder = Path(str(args.output_dir))
    if args.should_save and (args.save_strategy != "no" or not folder.is_dir()) and (reason := unwritable(folder)):
        raise ValueError(f"output_dir {str(folder)!r}: {reason}")


def unwritable(folder: Path) -> str:
    """Return why nothing can be written to `folder`, which need not exist yet, and the fix; empty if it can."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.is_symlink() or place.exists())
    try:
        # Tried, not looked up: root may write anywhere, but not to a file system that is mounted read-only.
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"nothing can be written in {str(place)!r} (the system says: {error.strerror}): name another folder"


def file_fault(file: Path) -> str:
    """Return why a file of a checkpoint cannot be read, after its name; of an index, also one that it lists."""
    from safetensors import safe_open

    if not file.is_file():  # a device has no end
        return f"{file.name} is missing"
    try:
        if file.suffix == ".json":
            if not isinstance(content := json.loads(file.read_text(encoding="utf-8")), dict):
                raise TypeError("it must hold an object, {...}")
            listed = sorted({*content.get("weight_map", {}).values()})
            return first_reason(file_fault(file.parent / name) for name in listed)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy"):
                return ""
        if file.name == ".metadata":  # of torch.distributed.checkpoint
            from torch.distributed.checkpoint import FileSystemReader

            for part in FileSystemReader(file.parent).read_metadata().storage_data.values():
                if (file.parent / part.relative_path).stat().st_size < part.offset + part.length:
                    return f"{part.relative_path} is damaged: its end is missing"
            return ""
        with file.open("rb") as opened:
            if not zipfile.is_zipfile(opened) and (opened.seek(0), opened.read(1)) != (0, b"\x80"):
                raise ValueError("it is not a whole file of torch.save")
    except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
        return f"{file.name} is damaged ({type(error).__name__}: {error})"
    return ""


def _weights(folder: Path) -> list[Path]:
    """Return the file of weights, or their index, that libraries load from a folder that may have several."""
    return [file for file in map(folder.joinpath, _WEIGHTS) if file.exists()][:1]


def check_weights(name: str, option: str = "model") -> None:
    """Raise `ValueError` for a local folder without weights or with damaged ones; libraries do not name the file."""
    folder = Path(name)
    names = {file.name for file in folder.rglob("*") if file.suffix in (".safetensors", ".bin", ".gguf")}
    fault = first_reason(map(file_fault, _weights(folder))) or ("" if names - {"training_args.bin"} else _NO_WEIGHTS)
    if fault and folder.is_dir():
        raise ValueError(f"{option} {name!r} cannot be loaded: {fault}; copy or download it again")


def checkpoint_fault(folder: Path) -> str:
    """Return which file of a checkpoint is missing or damaged; empty if TRL would resume it.

    Its state is written last. It may lack the states of optimizer, scheduler and generators (`save_only_model`).
    """
    weights, deepspeed = _weights(folder), [*folder.glob("global_step*")]
    sharded = [each / ".metadata" for pattern in _SHARDED for each in folder.glob(pattern)]
    states = [file for pattern in _STATES for file in folder.glob(pattern)]
    several = any(file.name.startswith(("adapter_model", "pytorch_model")) for file in states)
    no_weights = not (weights or several or sharded or deepspeed) and _NO_WEIGHTS
    no_tag = deepspeed and not (folder / "latest").is_file() and "latest is missing"
    files = (folder / "trainer_state.json", *weights, *sharded, *states)
    return first_reason((*map(file_fault, files), no_weights, no_tag))


def checkpoints(output_dir: str | None) -> list[Path]:
    """Return the checkpoints in `output_dir`, newest first: the folders whose names transformers reads as such."""
    steps = {path: re.match(r"checkpoint-(\d+)$", path.name) for path in Path(str(output_dir)).glob("checkpoint-*")}
    found = {path: int(step[1]) for path, step in steps.items() if step and path.is_dir()}
    return sorted(found, key=found.__getitem__, reverse=True)


def newest_checkpoint(output_dir: str | None) -> Path | None:
    """Return the newest complete checkpoint in `output_dir`; None if there is none."""
    return next((folder for folder in checkpoints(output_dir) if not checkpoint_fault(folder)), None)


def choose_checkpoint(requested: Any, output_dir: str | None) -> tuple[Any, str]:
    """Return the checkpoint to resume from, and a warning if a newer one is not complete.

    `requested` as `Trainer.train` takes it: a folder, which must be complete, or True for the last in `output_dir`.
    """
    is_folder = isinstance(requested, str | Path) and Path(requested).is_dir()
    folders = [Path(requested)] if is_folder else checkpoints(output_dir) if requested is True else []
    if not folders or not (fault := checkpoint_fault(folders[0])):
        return requested, ""
    newest = next((folder for folder in folders if not checkpoint_fault(folder)), None)
    if newest is not None:
        return str(newest), f"resume: {folders[0].name} is not complete ({fault}): taking {newest}, the newest one"
    what = f"resume_from_checkpoint: {str(folders[0])!r} is not a complete checkpoint ({fault})"
    raise ValueError(f"{what}: name another one, or train from the start")
