"""Private and deep names of torch, transformers, trl and peft: imported from here and looked up here.

If a version lacks a name in `NEEDS`, the library's own code runs instead and the report names it. `docs/upstream.md`
lists every private name that this package uses, also those with a fallback at the place of use.
"""

from __future__ import annotations

import pkgutil
from typing import Any


def _paths(text: str) -> tuple[str, ...]:
    """Return the dotted names of ``"torch: a b; trl.kernels: c"``: ``torch.a``, ``torch.b`` and ``trl.kernels.c``."""
    homes = (group.split(": ") for group in text.split("; "))
    return tuple(f"{home}.{name}" for home, names in homes for name in names.split())


_HOMES = {"LoraLinear": "peft.tuners.lora.layer.Linear"} | {
    path.rpartition(".")[2]: path
    for path in _paths(
        "peft.tuners.lora.layer: LoraLayer; peft.tuners.tuners_utils: BaseTunerLayer; transformers.pytorch_utils: "
        "Conv1D; torch._subclasses.fake_tensor: FakeTensor FakeTensorMode; "
        "torch.utils._pytree: tree_leaves tree_map_only; "
        "transformers.modeling_layers: GradientCheckpointingLayer; "
        "transformers.trainer_callback: CallbackHandler; "
        "trl.trainer.sft_trainer: DataCollatorForLanguageModeling DataCollatorForVisionLanguageModeling"
    )
}
"""Classes and functions that this module exports by their last name; a missing class is `Absent`."""

_LAYER = "transformers.modeling_layers: GradientCheckpointingLayer"
_GLOBAL = " ".join(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))

NEEDS = {
    part: _paths(text)
    for part, text in {
        "batches": "trl.trainer.sft_trainer: DataCollatorForLanguageModeling; transformers.Trainer: _get_dataloader; "
        "trl.SFTTrainer: _prepare_dataset; transformers.PreTrainedModel: _can_set_attn_implementation; "
        f"torch.utils.hooks.RemovableHandle: next_id; torch.nn.modules.module: {_GLOBAL}",
        "packed_attention": "transformers.masking_utils: ALL_MASK_ATTENTION_FUNCTIONS AttentionMaskInterface",
        "varlen": "torch.ops.aten: _flash_attention_forward _flash_attention_backward",
        "sync_free": "trl.kernels: ChunkedLogProbFunction chunked_logprob; "
        "transformers.Trainer: _maybe_log_save_evaluate _finalize_training",
        "lora": "peft.tuners.lora.layer: LoraLayer Linear; torch: _foreach_add_ _foreach_mul _foreach_mul_ "
        "_foreach_copy_; torch._C: _current_autograd_node; torch.UntypedStorage: _cdata; "
        "torch.autograd.graph.Node: _sequence_nr",
        "frozen_base": "torch: _scaled_mm",
        "moe": "transformers.integrations.moe: ALL_EXPERTS_FUNCTIONS ExpertsInterface",
        "activation_memory": f"{_LAYER}; torch.utils._pytree: tree_leaves",
        "checkpoint_offload": _LAYER,
        "mfu": "trl.trainer.utils: get_peak_flops",
        "cuda_graph": "peft.tuners.tuners_utils: BaseTunerLayer; torch: _foreach_copy_ _foreach_zero_",
    }.items()
}
"""Feature, or part of one -> the names that it cannot do without."""
PARTLY = frozenset({"sync_free", "frozen_base"})
"""Features that run without their names too and leave out the work that needs them."""


class Absent:
    """A class without instances: it stands for one that the installed version lacks."""


def resolve(path: str) -> Any:
    """Return the object at ``package.module.name``; None if there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def missing_names(part: str) -> list[str]:
    """Return the names of a part of `NEEDS` that the installed versions lack."""
    return [path for path in NEEDS.get(part, ()) if resolve(path) is None]


def missing_reason(part: str) -> str:
    """Return why the installed versions cannot run a part of `NEEDS`; empty if they can."""
    missing = missing_names(part)
    return f"the installed {missing[0].partition('.')[0]} has no {', '.join(missing)}" if missing else ""


def look_up() -> list[dict[str, Any]]:
    """Return a row for each name in `NEEDS`: ``name``, ``needed_by`` and whether it is ``there``."""
    names = dict.fromkeys(name for names in NEEDS.values() for name in names)
    users = {name: [part for part, needed in NEEDS.items() if name in needed] for name in names}
    return [{"name": name, "needed_by": parts, "there": resolve(name) is not None} for name, parts in users.items()]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(_HOMES[name])
    return Absent if value is None else value
