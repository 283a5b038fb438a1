"""Names that transformers has renamed while other libraries still read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from fastpack_trl.model.patches import patch_attribute, shared

_OLD, _NEW = "is_gradient_checkpointing", "is_activation_checkpointing"


@contextmanager
def silence_renamed_checkpointing() -> Iterator[None]:
    """Let models answer `is_gradient_checkpointing` without transformers' FutureWarning while the context is open.

    transformers 5.23 renamed the property. PEFT 0.21 and TRL 1.16 read the old name, which users cannot change.
    """
    if not hasattr(PreTrainedModel, _NEW) or _OLD not in vars(PreTrainedModel):
        yield
        return
    answer = property(_is_checkpointing)
    with shared(
        PreTrainedModel, "_fastpack_checkpointing_name", lambda: patch_attribute(PreTrainedModel, _OLD, answer)
    ):
        yield


def _is_checkpointing(model: Any) -> bool:
    return bool(getattr(model, _NEW))
