"""A device without bf16: its compute capability forced, and the loss scaler of fp16 where there is no such device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastpack_trl.kernels import _triton

T4 = (7, 5)


@contextmanager
def forced_capability(capability: tuple[int, int] = T4) -> Iterator[None]:
    """Every CUDA device says that it has this compute capability."""
    if torch.cuda.is_available():
        from triton.runtime import driver

        driver.active.get_current_target()  # Triton asks the same function, once: it compiles for the real device
    _triton.is_supported.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        yield
    _triton.is_supported.cache_clear()


def add_scaler(trainer: Any, **options: Any) -> torch.amp.GradScaler:
    """Give a trainer with ``fp16=True`` on the CPU what accelerate gives one on CUDA: autocast and a loss scaler."""
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler(trainer.args.device.type, **options)
    scaler: torch.amp.GradScaler = trainer.accelerator.scaler
    return scaler
