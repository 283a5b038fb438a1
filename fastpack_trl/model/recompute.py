"""What the arguments of a run say of its activations, and which of ours they contradict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastpack_trl.errors import first_reason


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
        args: of the run.
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
