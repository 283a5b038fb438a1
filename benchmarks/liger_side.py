"""Liger's kernels in one trainer's model, as ``use_liger_kernel=True``, while the other sides keep theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_utils import unwrap_model


@contextlib.contextmanager
def liger_kernels(trainer: Any) -> Iterator[list[str]]:
    """Put Liger's RMSNorm, rotary embedding and SwiGLU into the trainer's model, as TRL does; yield what was replaced.

    Liger sets its forwards on the modules of the model, and names in the file of the family, which every model of the
    process reads: those are put back at once, and set while this trainer's `training_step` runs.
    """
    model = unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    apply_liger_kernel(trainer.model, {"fused_linear_cross_entropy": False})
    replaced = {name: value for name, value in names.items() if before.get(name) is not value}
    names.update({name: before[name] for name in replaced})
    step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        names.update(replaced)
        try:
            return step(*args, **kwargs)
        finally:
            names.update({name: before[name] for name in replaced})

    trainer.training_step = training_step
    try:
        yield sorted(replaced)
    finally:
        del trainer.training_step
