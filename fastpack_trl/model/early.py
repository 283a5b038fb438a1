"""The host's work before the first step: what a library does once per process, and thousands of small operations."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import torch

from fastpack_trl.model.upstream import resolve


def begin_triton() -> threading.Thread | None:
    """Begin in a thread what Triton does before its first kernel, while TRL reads the data; return it, if there is any.

    Compiled kernels are found by a hash of Triton's own library, half a gigabyte, and by the version of its assembler,
    a process of its own; both let other threads run. What is not ready in time is done before a kernel.
    """
    if not torch.cuda.is_available() or (key := resolve("triton.runtime.cache.triton_key")) is None:
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


@contextlib.contextmanager
def many_small_operations(device: torch.device) -> Iterator[None]:
    """Switch off, until the context ends, what takes longer than small operations.

    A search for garbage goes over all libraries, for 0.4 s (accelerate's own, at the start of training, finds it too).
    On a GPU, to wake a host thread per core, and cuDNN's attention, which plans for 60 ms at each new length.
    """
    with contextlib.ExitStack() as stack:  # restores what was on: the rest may be off in another thread's context
        if gc.isenabled():
            stack.callback(gc.enable)
        gc.disable()
        if device.type == "cuda":
            # Autograd's threads begin with its first backward pass, and keep the number of host threads of that moment.
            torch.zeros((), device=device if torch.cuda.is_available() else "cpu", requires_grad=True).backward()
            if (threads := torch.get_num_threads()) > 1:
                stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(1)
            if torch.backends.cuda.cudnn_sdp_enabled():
                stack.callback(torch.backends.cuda.enable_cudnn_sdp, True)
            torch.backends.cuda.enable_cudnn_sdp(False)
        yield
