"""`on_stream`, `on_default_stream`: work on another CUDA stream, in order with the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream of a CUDA device the current one; each of the two waits for what the other one has queued."""
    outer = torch.cuda.current_stream(device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)


def on_default_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make the default stream of a CUDA device the current one; on other devices nothing is done.

    bitsandbytes' optimizers and quantizers launch there, whatever the current stream is.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return on_stream(device, torch.cuda.default_stream(device))
