"""How often operators are dispatched that a test asks about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Adds up ``asked(name, args)`` of every call; `name` as in ``mm``, without overload and namespace."""

    def __init__(self, asked: Callable[[str, Any], int]) -> None:
        super().__init__()
        self.asked, self.count = asked, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.asked(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))
