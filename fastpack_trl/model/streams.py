"""`on_default_stream`: what a library launches on the default stream, in order with the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Make the default stream of a CUDA device the current one; each waits for what the other one has queued.

    bitsandbytes' optimizers and quantizers launch there, whatever the current stream is.
    """
    if device.type != "cuda":
        yield
        return
    default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    default.wait_stream(current)
    try:
        with torch.cuda.stream(default):
            yield
    finally:
        current.wait_stream(default)
