"""What a YAML would hold on a GPU that is not here: the model on the meta device, its bytes by their kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastpack_trl.errors import UserError, did_you_mean, preparing
from fastpack_trl.recipe.arguments import Arguments

_GIB = 2**30
_NF4_BLOCK, _NESTED_BLOCK = 64, 256  # numbers per scale; scales per scale of scales
_RESERVE = 0.08  # of a device: CUDA's context, the allocator's gaps, workspaces of libraries


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device by its memory and compute capability: ``Gpu("4090", 24.0, (8, 9))``."""

    name: str
    gib: float
    capability: tuple[int, int]


GPUS = {
    name: Gpu(name, gib, capability)
    for name, gib, capability in (
        ("T4", 15.0, (7, 5)), ("3090", 24.0, (8, 6)), ("4090", 24.0, (8, 9)), ("5090", 32.0, (12, 0)),
        ("L4", 22.5, (8, 9)), ("A10", 22.5, (8, 6)), ("L40S", 45.0, (8, 9)), ("A100-40", 40.0, (8, 0)),
        ("A100", 80.0, (8, 0)), ("H100", 80.0, (9, 0)), ("H200", 141.0, (9, 0)), ("B200", 180.0, (10, 0)),
    )
}  # fmt: skip
COMMON = ("T4", "4090", "A100-40", "H100")


def gpu_of(text: str) -> Gpu:
    """Return a GPU by its name, or by memory and capability: ``"24GiB,8.9"``; raise `UserError` for others."""
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    if (found := known.get(text.lower())) is not None:
        return found
    given = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GiB|GB|G)?,\s*(\d+)\.(\d)", text, re.IGNORECASE)
    if given is None:
        raise UserError(
            f"--gpu {text!r} is not known{did_you_mean(text, GPUS)}: give memory and compute capability, e.g. "
            f"--gpu 24GiB,8.9, or one of {', '.join(GPUS)}"
        )
    return Gpu(text, float(given[1]), (int(given[2]), int(given[3])))


def forecast(arguments: Arguments, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return what a run holds before its first activation, and per GPU what is left for them and how it attends.

    No weights and no data are read. Full replicas: what several processes part among them is not counted.
    """
    model, frozen, trained = _model(arguments)
    optim = str(getattr(arguments.training.optim, "value", arguments.training.optim))
    moments = trained[0] * 2 if "8bit" in optim else 2 * trained[1]
    parts = {"frozen weights": frozen, "trained weights": trained[1], "gradients": trained[1], "optimizer": moments}
    total = sum(parts.values())
    rows = {}
    for gpu in gpus:
        left = gpu.gib * (1 - _RESERVE) - total / _GIB
        rows[gpu.name] = {"gib": gpu.gib, "left_gib": left, "attention": _attention(model, gpu)}
    return {"parts_gib": {name: size / _GIB for name, size in parts.items()}, "total_gib": total / _GIB, "gpus": rows}


def _model(arguments: Arguments) -> tuple[Any, float, tuple[int, float]]:
    """Return the model on meta, the bytes of its frozen weights, and numbers and bytes of those that are trained."""
    import torch
    import transformers
    from peft import get_peft_model
    from trl import get_peft_config

    options, training = arguments.model, arguments.training
    with preparing():
        config = transformers.AutoConfig.from_pretrained(
            options.model_name_or_path, revision=options.model_revision, trust_remote_code=training.trust_remote_code
        )
    dtype = getattr(torch, str(options.dtype), None) or getattr(config, "dtype", None) or torch.float32
    kind = "SequenceClassification" if arguments.method.command == "reward" else "CausalLM"
    with preparing(), torch.device("meta"):
        model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=dtype)
    head = model.get_output_embeddings()
    packed: dict[int, float] = {}  # bytes of a number
    if options.load_in_4bit or options.load_in_8bit:
        size = _nf4(bool(options.use_bnb_nested_quant)) if options.load_in_4bit else 1.0
        linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
        packed = {id(module.weight): size for module in linear}
    if training.moe_quantize_experts == "on":
        ends = (".experts.gate_up_proj", ".experts.down_proj")
        packed |= {id(p): _nf4(nested=True) for name, p in model.named_parameters() if name.endswith(ends)}
    peft = get_peft_config(options)
    if peft is not None:
        with preparing():
            model = get_peft_model(model, peft)
    frozen, numbers, size = 0.0, 0, 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            numbers += parameter.numel()
            # TRL makes the adapters of a quantised base bf16.
            size += parameter.numel() * (2 if options.load_in_4bit else parameter.element_size())
        else:
            frozen += parameter.numel() * packed.get(id(parameter), float(parameter.element_size()))
    return model, frozen, (numbers, size)


def _nf4(nested: bool) -> float:
    """Return the bytes of a number: half of one, and a scale per block: fp32, or one byte and an fp32 per 256."""
    scale = 1 + 4 / _NESTED_BLOCK if nested else 4
    return 0.5 + scale / _NF4_BLOCK


def _attention(model: Any, gpu: Gpu) -> str:
    """Return the first backend in the order of ``auto`` that takes the model there, with what is installed here."""
    import torch

    from fastpack_trl.attention.backends import AUTO
    from fastpack_trl.model.facts import read_features

    dtype = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
    features = replace(read_features(model, dtype), device_type="cuda", capability=gpu.capability, compute_dtype=dtype)
    return next((backend.name for backend in AUTO if not backend.refuses(features)), "padded_rows")
