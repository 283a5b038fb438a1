"""`AsyncCheckpointCallback`: layer inputs in host memory while any trainer of TRL trains."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from typing import Any, get_args

from transformers import Trainer, TrainerCallback

from fastpack_trl.checkpointing.offload import HostUse, Mode, Offload, offload_checkpoints
from fastpack_trl.errors import short_repr
from fastpack_trl.model.changes import callers
from fastpack_trl.model.checkpoint_seam import checkpointed_layers
from fastpack_trl.model.recompute import offload_conflict, offload_unavailable

logger = logging.getLogger(__name__)


class AsyncCheckpointCallback(TrainerCallback, AbstractContextManager["AsyncCheckpointCallback"]):
    """Keep inputs of checkpointed layers in host memory, fetched ahead in backward; also for TRL's own `SFTTrainer`.

    ``SFTTrainer(..., callbacks=[AsyncCheckpointCallback()])``. Frees ``layers x tokens x hidden x itemsize`` bytes of
    the device; two inputs remain there. The copies overlap with the recompute. Loss and gradients are those of
    checkpointing without it, bit for bit. It is installed when training begins and taken out when it ends.

    transformers sends no event when training ends by an exception: what then runs with gradients is offloaded too,
    until the next `train()` installs it anew. `close()`, or a ``with`` block around `train()`, takes it out at once.

    Args:
        mode: ``double_buffer``, or ``single_buffer``: each input is fetched when it is needed.

    Attributes:
        offload: offload of the current run, with its use of host memory; None if it is off.
        use: host memory of the last run; None before.
        reason: why it is off on this machine; empty if it is on.

    Raises:
        ValueError: an unknown mode. When training begins: no checkpointing, `use_reentrant=True`, another offload,
            DeepSpeed or FSDP version 1.
    """

    def __init__(self, mode: Mode = "double_buffer") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode={short_repr(mode)} is not available: use one of {', '.join(get_args(Mode))}")
        self.mode: Mode = mode
        self.offload: Offload | None = None
        self.use: HostUse | None = None
        self.reason = ""
        self._options: dict[str, Any] = {}  # of `offload_checkpoints`
        self._stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Install the offload: checkpointing has just been switched on."""
        self.close()  # what an exception in an earlier run left behind
        if conflict := offload_conflict(args, next(callers(Trainer.train), None)):
            raise ValueError(f"AsyncCheckpointCallback: {conflict}")
        self.reason = offload_unavailable(args.device)
        if self.reason:
            logger.warning(f"checkpoint_offload: off ({self.reason})")
            return
        offload = offload_checkpoints(checkpointed_layers(model), self.mode, **self._options)
        self.offload = self._stack.enter_context(offload)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Take the offload out of the model. May be called at any time, also twice."""
        self._stack.close()
        if self.offload is not None:
            self.use, self.offload = self.offload.use, None

    def __exit__(self, *exc: object) -> None:
        self.close()
