"""Registration of each kind of hook, on one module and on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

REGISTER: dict[str, Callable[[nn.Module, Any], RemovableHandle]] = {
    "forward hook": lambda module, hook: module.register_forward_hook(hook),
    "forward pre-hook": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward hook": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre-hook": lambda module, hook: module.register_full_backward_pre_hook(hook),
}
REGISTER_GLOBAL: dict[str, Callable[[Any], RemovableHandle]] = {
    "forward hook": torch_module.register_module_forward_hook,
    "forward pre-hook": torch_module.register_module_forward_pre_hook,
    "backward hook": torch_module.register_module_full_backward_hook,
    "backward pre-hook": torch_module.register_module_full_backward_pre_hook,
}
