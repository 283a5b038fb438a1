"""The option `frozen_base`: matmuls with frozen LoRA bases in FP8 during training, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastpack_trl.kernels.fp8 import failure_of_products
from fastpack_trl.lora.base_weight import HasFrozenWeight, put_in_fp8, reasons_against
from fastpack_trl.lora.report import LoraReport, has_lora, shown_bytes
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.run import DEEPSPEED, SHARDED, Run

FEATURE = "frozen_base"


def concerns(run: Run) -> bool:
    """Return whether the run asks for FP8."""
    return bool(run.settings.frozen_base == "fp8")


def why_not(run: Run) -> Iterator[object]:
    """Yield why this run does not support FP8 bases, with the fix."""
    off = run.settings.lora == "off"
    yield off and "lora='off' leaves LoRA layers to PEFT, which has no FP8 matmuls: set lora='auto'"
    yield not has_lora(run.model) and (
        "the model has no LoRA layers, and full fine-tuning changes the weights that would be quantized once: give "
        "peft_config=LoraConfig(...)"
    )
    engine = (run.is_sharded and SHARDED) or (run.is_deepspeed and DEEPSPEED)
    yield engine and f"{engine}: train with DDP"
    replicas = run.args.n_gpu > 1
    yield replicas and "torch.nn.DataParallel copies the model in each step: start it with accelerate launch"
    yield missing_reason(FEATURE)
    yield _refused_by_device(run)
    yield run.lora is None and "it needs the fast LoRA layers, which are off (see the report)"


def _refused_by_device(run: Run) -> str:
    """Return why the device has no FP8 matmuls; the reference in plain torch runs anywhere, also in fp32."""
    device = run.device
    if device.type != "cuda":
        return f"a {device.type} device has no FP8 matmuls: train on a CUDA device from Ada or Hopper on"
    dtype = run.compute_dtype or next(run.model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the run computes in {dtype}, and FP8 matmuls return 16 bits: set bf16=True"
    if failure := failure_of_products(device, dtype):
        return f"{torch.cuda.get_device_name(device)} does not support FP8 matmuls in {dtype}: {failure}"
    return ""


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Multiply by the frozen weights of LoRA layers in FP8; unsupported layers are counted with their reason.

    Raises:
        ValueError: no layer supports it; with the fix.
    """
    applied: LoraReport = run.lora
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
        raise ValueError(f"frozen_base='fp8': no LoRA layer supports it: {listed}; {run.remedy(FEATURE)}")
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
