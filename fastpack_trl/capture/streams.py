"""The stream that recorded steps run on, and the optimizers that launch on another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.model.changes import during_training
from fastpack_trl.run import Run


@contextmanager
def on_side_stream(run: Run, device: CudaGraphs) -> Iterator[None]:
    """Train on a side stream until the context ends (`CudaGraphs.on_side_stream`)."""
    with device.on_side_stream(), _steps_in_order(run, device):
        yield


@contextmanager
def _steps_in_order(run: Run, device: CudaGraphs) -> Iterator[None]:
    """Order the steps of an optimizer of bitsandbytes, which launches them on the default stream, once it is there."""
    with ExitStack() as ordered:

        def order() -> None:
            ordered.close()  # `train` may begin again by itself, with smaller batches
            optimizer = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)  # inside of accelerate's
            if any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__):
                ordered.enter_context(device.steps_in_order(optimizer))

        with during_training(run.trainer, at_begin=order):
            yield
