"""How many kernels a call launches on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastpack_trl.bench.watch import device_events


def kernels_of(call: Callable[[], object]) -> int:
    """Run `call` once under torch's profiler; return its kernels, copies and fills left out."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in device_events(seen.events() or ()))
