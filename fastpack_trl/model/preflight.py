"""Checks before a trainer prepares anything: counts, the output folder, the model's files, activations asked twice."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fastpack_trl.errors import first_reason, shown
from fastpack_trl.model.saved_files import weights_fault

_COUNTS = {
    "per_device_train_batch_size": "rows per device and micro-batch, e.g. 8",
    "gradient_accumulation_steps": "micro-batches per optimizer step, 1 for no accumulation",
    "max_length": "tokens per row, or None for no limit",
    "pad_to_multiple_of": "a number of tokens, or None",
}
_COUNTS_OF_EVALUATION = {
    "per_device_eval_batch_size": "rows per device and evaluation step, e.g. 8",
    "eval_accumulation_steps": "evaluation steps between two moves to the host, or None for one move at the end",
}
_OTHER_FILES = {"gguf_file", "subfolder", "use_safetensors", "variant"}


def bound(stock: type, trainer: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer of TRL by name.

    Raises:
        TypeError: one that it does not take; for a name of earlier versions, or of its config, with the one it has.
    """
    signature = inspect.signature(stock.__init__)  # type: ignore[misc]
    try:
        return signature.bind(trainer, *args, **kwargs).arguments
    except TypeError as error:
        for name in kwargs.keys() - signature.parameters:
            instead = "processing_class=" if name == "tokenizer" else "args=, a field of its config"
            known = {"tokenizer", "max_seq_length"} | set(getattr(kwargs.get("args"), "__dataclass_fields__", ()))
            if name in known:
                raise TypeError(f"{stock.__name__} has no argument {name!r}: give it as {instead}") from error
        raise


def check_given(given: Mapping[str, Any]) -> None:
    """Check the arguments of `SFTTrainer`, by name, before stock loads the model and prepares the data.

    Raises:
        ValueError: names the value and the remedy.
    """
    args, model = given.get("args"), given.get("model")
    if args is not None:
        check_counts(args)
        check_output_dir(args)
    if isinstance(model, PreTrainedModel) and not model.can_generate():
        raise ValueError(
            f"{type(model).__name__} cannot generate, which SFTTrainer needs: load an AutoModelForCausalLM"
        )
    if isinstance(model, str):
        check_weights(model, getattr(args, "model_init_kwargs", None) or {})


def check_counts(args: Any) -> None:
    """Check the settings that count something. Those of evaluation matter only where the run evaluates.

    Raises:
        ValueError: one is below 1.
    """
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    for name, meaning in (_COUNTS | _COUNTS_OF_EVALUATION if evaluates else _COUNTS).items():
        value = getattr(args, name, None)
        if isinstance(value, int | float) and not value >= 1:
            raise ValueError(f"{name}={shown(value)} is below 1: give {meaning}")


def check_output_dir(args: Any) -> None:
    """Check that `output_dir` can be made and, in a run that saves, written to.

    Raises:
        ValueError: it cannot; names the path that is in the way.
    """
    folder = Path(str(args.output_dir))
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) != "no"
    if args.should_save and (saves or not folder.is_dir()) and (reason := unwritable(folder)):
        raise ValueError(f"output_dir {str(folder)!r}: {reason}")


def unwritable(folder: Path) -> str:
    """Return why nothing can be written to `folder`, which need not exist yet, and the remedy; empty where it can."""
    place = folder
    try:
        for place in (folder, *folder.absolute().parents):
            if place.is_symlink() and not place.exists():
                return f"{str(place)!r} is a link to nothing: name a folder or a new path"
            if not place.exists():
                continue
            if not place.is_dir():
                return f"{str(place)!r} is a file: name a folder or a new path"
            # Tried, not asked: root may write anywhere, but not on what is mounted read-only.
            with tempfile.TemporaryFile(dir=place):
                break
    except OSError as error:
        return f"nothing can be written in {str(place)!r} (the system says: {error.strerror}): name another folder"
    return ""


def check_weights(name: str, init: Mapping[str, Any], option: str = "model") -> None:
    """Check that a local folder has weights, and their headers; a hub name passes.

    Args:
        init: keywords of `from_pretrained`; some name other files, which are not checked.
        option: what the user gave the name to, for the message.

    Raises:
        ValueError: there are none, a file was cut short, or is a pointer of git-lfs.
    """
    folder = Path(name)
    if set(init) & _OTHER_FILES or not folder.is_dir():
        return
    if fault := weights_fault(folder, needed=True):
        raise ValueError(f"{option} {name!r} cannot be loaded: {fault}; copy or download it again")


def checkpointing_arguments(args: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether a run checkpoints, and with what keywords. transformers 5.23 renamed both arguments."""
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    return bool(getattr(args, name)), dict(getattr(args, f"{name}_kwargs") or {})


def other_offload(args: Any) -> str:
    """Return which other offload of the same memory a run asks for, with the remedy; empty where none."""
    other = ""
    if getattr(args, "activation_offloading", False):
        other = "activation_offloading=True"
    elif checkpointing_arguments(args)[1].get("offload"):
        other = "gradient_checkpointing_kwargs={'offload': True}"
    return f"{other} is another offload of the same memory: leave one of the two out" if other else ""


def against_plan(args: Any, level: str, offload: str) -> Iterator[object]:
    """Yield what else in the arguments of a run, beside the fields `level` and `offload`, says what to keep."""
    enabled, keywords = checkpointing_arguments(args)
    keywords.pop("use_reentrant", None)  # False is what a level uses; True is asked for by DeepSpeed only
    yield other_offload(args)
    yield not enabled and "gradient_checkpointing=False keeps all activations"
    yield keywords and f"gradient_checkpointing_kwargs={keywords} says what to keep"
    own = offload not in ("auto", "off") and level != "offload"
    yield own and f"checkpoint_offload={offload!r} says what to keep"
    yield args.torch_compile and "torch_compile=True decides by itself what to keep"


def _against_offload(args: Any) -> Iterator[object]:
    enabled, keywords = checkpointing_arguments(args)
    yield other_offload(args)
    yield not enabled and "gradient_checkpointing=False: without checkpointing no layer input is kept by itself"
    reentrant = keywords.get("use_reentrant")
    yield reentrant and "use_reentrant=True stores layer inputs where no hook sees them: set it to False"


def check_recompute(args: Any, level: str, offload: str, reasons: Iterator[object] | None = None) -> None:
    """Check that what a level or an offload was asked for by name is not excluded by another setting.

    Args:
        level, offload: the fields `activation_memory` and `checkpoint_offload`.
        reasons: against a plan; default: those that the arguments have.

    Raises:
        ValueError: it is; names both.
    """
    asked = level not in ("auto", "off") and (level != "keep" or checkpointing_arguments(args)[0])
    if asked and (conflict := first_reason(reasons or against_plan(args, level, offload))):
        raise ValueError(f"activation_memory={level!r}: {conflict}; leave one of the two out")
    if offload not in ("auto", "off") and (conflict := first_reason(_against_offload(args))):
        raise ValueError(
            f"checkpoint_offload={offload!r}: {conflict}; set checkpoint_offload='auto' to train without it"
        )
