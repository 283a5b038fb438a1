"""How often operators are dispatched that a test asks about, and how many kernels a call launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Adds up ``asked(name, args)`` of every call; `name` as in ``mm``, without overload and namespace."""

    def __init__(self, asked: Callable[[str, Any], int]) -> None:
        super().__init__()
        self.asked, self.count = asked, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.asked(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


def kernels_of(call: Callable[[], object]) -> int:
    """Run `call` once under torch's profiler; return its kernels on a CUDA device, without copies and fills."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        for event in seen.events() or ()
        if not getattr(event, "is_user_annotation", False)
    )
