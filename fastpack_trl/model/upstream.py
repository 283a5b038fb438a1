"""Names of other libraries that are private or lie deep inside, looked up without failing.

Where a version has moved one, the part that needs it runs as stock, named; the rest of the package works.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.lora.layer import LoraLayer
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D
    from transformers.trainer_callback import CallbackHandler
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

__all__ = [
    "CallbackHandler", "Conv1D", "DataCollatorForLanguageModeling", "GradientCheckpointingLayer", "LoraLayer",
    "LoraLinear", "TorchDispatchMode", "found", "lacks", "tree_leaves",
]  # fmt: skip

_HOMES = {
    "CallbackHandler": "transformers.trainer_callback.CallbackHandler",
    "Conv1D": "transformers.pytorch_utils.Conv1D",
    "DataCollatorForLanguageModeling": "trl.trainer.sft_trainer.DataCollatorForLanguageModeling",
    "GradientCheckpointingLayer": "transformers.modeling_layers.GradientCheckpointingLayer",
    "LoraLayer": "peft.tuners.lora.layer.LoraLayer",
    "LoraLinear": "peft.tuners.lora.layer.Linear",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
}

NEEDS: dict[str, tuple[str, ...]] = {
    "batches": (_HOMES["DataCollatorForLanguageModeling"],),
    "packed_attention": (
        "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS",
        "transformers.masking_utils.AttentionMaskInterface",
    ),
    "varlen": ("torch.ops.aten._flash_attention_forward", "torch.ops.aten._flash_attention_backward"),
    "per_document on the CPU": (
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "sync_free": ("trl.kernels.ChunkedLogProbFunction", "trl.kernels.chunked_logprob"),
    "lora": (
        _HOMES["LoraLayer"], _HOMES["LoraLinear"], "torch._foreach_mul", "torch._foreach_mul_", "torch._foreach_copy_",
        "torch.ops.aten._unsafe_view",
    ),
    "moe": ("transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS", "transformers.integrations.moe.ExpertsInterface"),
    "activation_memory": (
        _HOMES["GradientCheckpointingLayer"], _HOMES["TorchDispatchMode"], _HOMES["tree_leaves"]
    ),
    "checkpoint_offload": (_HOMES["GradientCheckpointingLayer"],),
    "layer_compile": (_HOMES["GradientCheckpointingLayer"],),
    "mfu": ("trl.trainer.utils.get_peak_flops",),
}  # fmt: skip
"""What each part cannot do without, beside the public interfaces."""


class Absent:
    """Stands for a class that is not there: nothing is an instance of it."""


def found(path: str) -> Any:
    """The object at ``package.module.name``; None where there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def lacks(part: str) -> str:
    """Why a part of `NEEDS` cannot be used with the installed versions; empty where it can."""
    missing = [path for path in NEEDS.get(part, ()) if found(path) is None]
    return f"the installed {missing[0].partition('.')[0]} has no {', '.join(missing)}" if missing else ""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = found(_HOMES[name])
    return Absent if value is None else value
