"""Registration of each kind of hook, on one module and on all."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module

_KINDS = {
    "forward hook": "forward_hook", "forward pre-hook": "forward_pre_hook", "backward hook": "full_backward_hook",
    "backward pre-hook": "full_backward_pre_hook",
}  # fmt: skip
REGISTER = {kind: getattr(nn.Module, f"register_{name}") for kind, name in _KINDS.items()}
"""Called with a module and a hook."""
REGISTER_GLOBAL = {kind: getattr(module, f"register_module_{name}") for kind, name in _KINDS.items()}
