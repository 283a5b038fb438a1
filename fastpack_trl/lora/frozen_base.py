"""The feature `frozen_base`: matmuls with frozen LoRA bases in FP8 during training, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fastpack_trl.kernels.fp8 import MULTIPLE, failure_of_products
from fastpack_trl.lora.base_weight import Fp8Weight, HasFrozenWeight, loaded_weight
from fastpack_trl.lora.report import LoraReport, has_lora, shown_bytes
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.run import DEEPSPEED, SHARDED, Run

FEATURE = "frozen_base"
_KEEP = "set frozen_base='as_loaded'"


@contextmanager
def frozen_base(run: Run) -> Iterator[None]:
    """Multiply by the frozen weights of LoRA layers in FP8; unsupported layers are counted with their reason.

    Raises:
        ValueError: the run, the model or the device does not support it; with the fix.
    """
    if run.settings.frozen_base == "as_loaded" or not run.training:
        yield
        return
    if reason := _refusal(run):
        raise ValueError(f"frozen_base='fp8': {reason}")
    applied = run.get_state(LoraReport)
    if applied is None:
        raise ValueError(f"frozen_base='fp8' needs the fast LoRA layers, which are off (see the report); {_KEEP}")
    layers: dict[str, Any] = {
        name: each for name, each in run.model.named_modules() if isinstance(each, HasFrozenWeight)
    }
    dtype = run.compute_dtype or next(run.model.parameters()).dtype
    against = reasons_against(run.model, layers)
    chosen = [layer for name, layer in layers.items() if name not in against]
    others = Counter(against.values())
    others.update({reason: len(names) for reason, names in applied.handed_over.items()})
    others.update({"LoRA on stacked parameters": len(applied.on_parameters)} if applied.on_parameters else {})
    if not chosen:
        listed = "; ".join(f"{count} ({reason})" for reason, count in others.items())
        raise ValueError(f"frozen_base='fp8': no LoRA layer supports it: {listed}; {_KEEP}")
    nbytes = sum(layer.in_features * layer.out_features for layer in chosen)
    try:
        for layer in chosen:
            put_in_fp8(layer, dtype)
        text = f"{len(chosen)} of {len(chosen) + sum(others.values())} LoRA bases multiply in FP8, forward and backward"
        parts = [
            f"{text}: results change",
            f"{shown_bytes(nbytes)} of FP8 weights in addition to the loaded ones",
            "evaluation during training uses FP8 too; after training the base is as loaded",
            *(f"as loaded: {count} ({reason})" for reason, count in others.items()),
        ]
        run.set_status(FEATURE, "on", "fp8", "; ".join(parts))
        yield
        _remark_on_lost(run, chosen)
    finally:
        for layer in chosen:
            layer._fastpack_drop_copy()


def _remark_on_lost(run: Run, layers: list[Any]) -> None:
    if lost := sum(not layer.fastpack_multiplies_in_fp8 for layer in layers):
        run.report.remark(
            FEATURE,
            f"{lost} of {len(layers)} layers ended the run as loaded: merged into, moved or written to in the middle "
            "of it",
        )


def put_in_fp8(layer: Any, dtype: torch.dtype) -> None:
    """Multiply by the frozen weight of a LoRA layer in FP8; `_fastpack_drop_copy` reverts that.

    Args:
        layer: one without an entry in `reasons_against`.
        dtype: to which a 4-bit weight is dequantized.
    """
    base = layer.base_layer
    weight = loaded_weight(base).dense(dtype if type(base).__name__ == "Linear4bit" else base.weight.dtype)
    layer._fastpack_keep_copy(Fp8Weight.of(weight))


def reasons_against(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, str]:
    """Return why layers cannot multiply in FP8, by name; supported layers are omitted."""
    uses = Counter(id(own) for module in model.modules() for own in module._parameters.values())
    base = text_model(model)
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    reasons = {name: _reason_against(layer, head, uses) for name, layer in layers.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason_against(layer: Any, head: Any, uses: Mapping[int, int]) -> str:
    weight = layer.base_layer._parameters.get("weight")
    if layer is head:
        return "the head"
    if type(layer.base_layer).__name__ == "Linear8bitLt":
        return "8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits"
    if layer.fastpack_multiplies_in_fp8:
        return "a weight that another run holds in FP8: end that run first"
    if layer.merged:
        return "merged adapters: call model.unmerge_adapter() first"
    if weight is None or weight.requires_grad:
        return "a base that is not a frozen parameter"
    if uses[id(weight)] > 1:
        return "a weight that other modules share"
    if layer.fastpack_active_adapter() is None:
        return "no or several active adapters"
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"dimensions that are not multiples of {MULTIPLE}"
    return ""


def _refusal(run: Run) -> str:
    """Return why this run does not support FP8 bases, with the fix, or ``""``."""
    if run.settings.lora == "off":
        return f"lora='off' leaves LoRA layers to PEFT, which has no FP8 matmuls; set lora='auto', or {_KEEP}"
    if not has_lora(run.model):
        return (
            "the model has no LoRA layers, and full fine-tuning changes the weights that would be quantized once; give "
            f"peft_config=LoraConfig(...), or {_KEEP}"
        )
    if run.is_sharded or run.is_deepspeed:
        return f"{SHARDED if run.is_sharded else DEEPSPEED}; train with DDP, or {_KEEP}"
    if run.args.n_gpu > 1:
        return f"torch.nn.DataParallel copies the model in each step; start it with accelerate launch, or {_KEEP}"
    if missing := missing_reason(FEATURE):
        return f"{missing}; {_KEEP}"
    return _refused_by_device(run)


def _refused_by_device(run: Run) -> str:
    """Return why the device has no FP8 matmuls; the reference in plain torch runs anywhere, also in fp32."""
    device = run.device
    if device.type != "cuda":
        return f"a {device.type} device has no FP8 matmuls; train on a CUDA device from Ada or Hopper on, or {_KEEP}"
    dtype = run.compute_dtype or next(run.model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the run computes in {dtype}, and FP8 matmuls return 16 bits; set bf16=True, or {_KEEP}"
    if failure := failure_of_products(device, dtype):
        return f"{torch.cuda.get_device_name(device)} does not support FP8 matmuls in {dtype}: {failure}; {_KEEP}"
    return ""
