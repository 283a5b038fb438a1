"""The ordered list of features, which are installed on a model and its trainer around a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.feature import install_attention, plan_rows_again
from fastpack_trl.attention.share_prefixes import share_prefixes
from fastpack_trl.callbacks.save_report import save_report
from fastpack_trl.capture.feature import cuda_graph, side_stream
from fastpack_trl.checkpointing.activation_memory import activation_memory
from fastpack_trl.checkpointing.checkpoint_offload import checkpoint_offload
from fastpack_trl.compile.layer_compile import layer_compile
from fastpack_trl.lora.feature import lora
from fastpack_trl.lora.frozen_base import frozen_base
from fastpack_trl.model.facts import UNREADABLE, text_model
from fastpack_trl.model.precision import not_packed_on_cpu
from fastpack_trl.model.upstream import PARTLY, missing_reason
from fastpack_trl.moe.feature import moe
from fastpack_trl.run import Run
from fastpack_trl.step.merge_accumulation import merge_accumulation
from fastpack_trl.step.sync_free import sync_free

logger = get_logger(__name__)


class Feature(NamedTuple):
    """One line of `FEATURES`."""

    install: Callable[[Run], AbstractContextManager[Any] | None]
    """Changes trainer or model for a run, and returns a context that restores them, or None. Named after its field of
    the config if it has one (`install_attention`: ``packed_attention``)."""
    trainers: Literal["any", "sft"]
    """``any``: reads and changes the model of any trainer of TRL; ``sft``: its loss, metrics or data as in SFT."""
    when: Literal["always", "training"] = "always"
    falls_back: bool = True
    """Whether TRL's implementation runs, reported once, if it cannot read the model or a name is missing."""

    def enter(self, run: Run, stack: ExitStack) -> None:
        """Install the feature until `stack` closes.

        Raises:
            ValueError: `train` begins, the setting is explicit and the feature is unavailable; or an error of its own.
            torch.AcceleratorError: the device failed, independently of the model.
        """
        name = str(getattr(self.install, "__name__", self.install))
        if (
            self.falls_back
            and run.settings.get(name) != "off"
            and name not in PARTLY
            and (missing := missing_reason(name))
        ):
            _leave_to_stock(run, name, missing)
            return
        try:
            if (installed := self.install(run)) is not None:
                stack.enter_context(installed)
        except (ValueError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (*UNREADABLE, ImportError) as error:
            if not self.falls_back:
                raise
            logger.debug(f"{name} failed while it was entered", exc_info=True)  # of the model or of ours
            model = type(text_model(run.model)).__name__
            _leave_to_stock(run, name, f"{model} cannot be read: {type(error).__name__}: {error}")


def _leave_to_stock(run: Run, name: str, reason: str) -> None:
    run.set_status(name, "stock", "stock", reason)
    logger.warning(f"{name}: stock ({reason})")


def _cpu_packing(run: Run) -> AbstractContextManager[None]:
    return not_packed_on_cpu(run.model, training=run.training)


FEATURES: tuple[Feature, ...] = (
    Feature(_cpu_packing, "any", falls_back=False),
    Feature(side_stream, "sft", "training", falls_back=False),  # also restores after the packing check and the plan
    Feature(plan_rows_again, "any", falls_back=False),
    Feature(moe, "any"),  # on four-bit experts PEFT's own forward would fail in the packing proof
    Feature(install_attention, "any", falls_back=False),  # to padded rows, by itself
    Feature(lora, "any"),  # keeps copies of frozen weights before memory is planned
    Feature(frozen_base, "any"),  # of the layers of `lora`; changes the memory that is left to plan
    Feature(sync_free, "sft"),
    Feature(share_prefixes, "sft", "training"),  # needs the loss of `sync_free`, and the attention
    Feature(activation_memory, "any", "training"),
    Feature(checkpoint_offload, "any"),  # unless that plan offloads
    Feature(merge_accumulation, "sft", "training"),  # needs the loss of `sync_free`
    Feature(layer_compile, "any", "training"),  # compiles the forwards that the others have installed
    Feature(cuda_graph, "sft"),  # records what all the others run
    Feature(save_report, "any", "training", falls_back=False),
)
"""Entered in this order when `train`, `evaluate` or `predict` begins, and left in reverse order."""
