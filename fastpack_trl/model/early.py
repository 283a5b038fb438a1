"""Work that a library does once per process before its first use, begun in a thread while TRL reads the data."""

from __future__ import annotations

import threading

import torch

from fastpack_trl.model.upstream import resolve


def hash_triton() -> threading.Thread | None:
    """Begin to hash Triton's library, half a gigabyte: compiled kernels are found by it; return the thread, if any.

    The hash lets other threads run. Without it, or if it is not ready in time, Triton computes it before a kernel.
    """
    work = resolve("triton.runtime.cache.triton_key") if torch.cuda.is_available() else None
    if work is None:
        return None
    thread = threading.Thread(target=work, name="fastpack-triton", daemon=True)
    thread.start()
    return thread
