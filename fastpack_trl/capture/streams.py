"""The stream that recorded steps run on, and the optimizers that launch on another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.model.changes import during_training
from fastpack_trl.run import Run


@contextmanager
def on_side_stream(run: Run, device: CudaGraphs) -> Iterator[None]:
    """Train on a side stream, in order with the steps of bitsandbytes' optimizers, which launch on the default one."""

    def order() -> None:
        ordered.close()  # `train` may begin again by itself, with smaller batches
        optimizer = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)  # inside of accelerate's
        if any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__):
            ordered.enter_context(device.steps_in_order(optimizer))

    with device.on_side_stream(), ExitStack() as ordered, during_training(run.trainer, at_begin=order):
        yield
