"""Work that a library does once per process before its first use, begun in a thread while TRL reads the data."""

from __future__ import annotations

import contextlib
import threading

import torch

from fastpack_trl.model.upstream import resolve


def begin_triton() -> threading.Thread | None:
    """Begin what Triton does before its first kernel, and return the thread, if there is any.

    Compiled kernels are found by a hash of Triton's own library, half a gigabyte, and by the version of its assembler,
    a process of its own; both let other threads run. What is not ready in time is done before a kernel.
    """
    key = resolve("triton.runtime.cache.triton_key") if torch.cuda.is_available() else None
    if key is None:
        return None

    def work() -> None:
        with contextlib.suppress(Exception):  # which the first kernel raises, where it is named
            key()
            driver, make_backend = resolve("triton.runtime.driver"), resolve("triton.compiler.compiler.make_backend")
            if driver is not None and make_backend is not None and torch.cuda.is_initialized():  # processes may fork
                make_backend(driver.active.get_current_target()).hash()

    thread = threading.Thread(target=work, name="fastpack-triton", daemon=True)
    thread.start()
    return thread
