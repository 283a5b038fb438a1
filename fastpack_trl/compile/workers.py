"""Processes that compile kernels for Inductor, started before there is anything to compile."""

from __future__ import annotations

from contextlib import suppress

from fastpack_trl.compile.layer_compile import why_not
from fastpack_trl.model.upstream import found
from fastpack_trl.run import Run


def start_workers(run: Run) -> None:
    """Start the processes to which Inductor gives its Triton kernels, where layers of this run may be compiled.

    They import torch first, which takes seconds; kernels that come before are compiled one after the other in this
    process. torch starts them when it has traced the first graph, so here they get ready beside the packing proof and
    the plan. Nothing is started twice, and torch's own settings hold (``TORCH_WARM_POOL=0``,
    ``TORCHINDUCTOR_COMPILE_THREADS=1``).
    """
    if run.device.type != "cuda" or why_not(run):  # other devices compile no Triton
        return
    start = found("torch._inductor.async_compile.maybe_warm_pool")
    if start is not None:
        with suppress(OSError):  # no further process can be started: torch finds out by itself
            start()
