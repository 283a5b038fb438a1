"""Models, rows and steps for the tests of compiled layers."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_material import packed, relative_errors
from offload_material import enable
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import CompiledLayers, compiled_layers
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import gradients, tiny_model

FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss")
# With all experts chosen no token changes its experts for a rounding.
OVERRIDES: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts_per_tok": 4}, "gpt_oss": {"num_experts_per_tok": 4}}

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]
# Traces, differentiates and partitions as Inductor does, without generating code.
PARTITIONED = "aot_eager_decomp_partition"


class Counting:
    """A backend that counts the graphs and runs what was traced, or differentiated with `differentiate`."""

    def __init__(self, *, differentiate: bool = False) -> None:
        self.graphs = 0
        self.differentiate = differentiate

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs) if self.differentiate else graph.forward


def make(family: str, *, lora: bool = False, checkpointing: bool = False, **overrides: Any) -> Any:
    model = tiny_model(family, **OVERRIDES.get(family, {}), **overrides)
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapters(model, family))
    if checkpointing:
        checkpoint(model)
    return model.train()


def adapters(model: Any, family: str) -> Any:
    """LoRA on the projections, those of experts left out."""
    from peft import LoraConfig

    names = ATTENTION + ([] if family in OVERRIDES else ["gate_proj", "up_proj", "down_proj", "gate_up_proj"])
    targets = [name for name in names if any(key.endswith(name) for key, _ in model.named_modules())]
    return LoraConfig(r=4, target_modules=targets, init_lora_weights=False)


def checkpoint(model: Any) -> None:
    enable(model).enable_input_require_grads()


def row(seed: int, documents: int | None = None, longest: int = 20) -> tuple[Tensor, PackedBatch]:
    draw = random.Random(seed)
    lengths = [draw.randrange(2, longest) for _ in range(documents or draw.randrange(1, 7))]
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, PackedBatch.from_lengths(lengths, labels=ids)


def one_step(model: Any, ids: Tensor, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = packed(model, ids, batch)
    loss.backward()
    batch.clear_derived()
    return loss.item(), gradients(model)


def compare(
    model: Any, backend: Any, *, device: str = "cpu", autocast: torch.dtype | None = None, rows: int = 3,
    reference: Any = None,
) -> CompiledLayers:  # fmt: skip
    """Asserts: compiled is within twice eager's own error against float64, over a few rows."""
    reference = reference if reference is not None else copy.deepcopy(model).cpu().double()
    if isinstance(getattr(reference.config, "_experts_implementation", None), str):
        reference.set_experts_implementation("eager")  # grouped matrix products know no float64
    data = [row(seed) for seed in range(rows)]
    with packed_attention(reference, "per_document"):
        exact = [one_step(reference, *one) for one in data]

    def run() -> Tensor:
        steps = (one_step(model, ids.to(device), batch.to(device)) for ids, batch in data)
        return torch.stack([relative_errors(step, known) for step, known in zip(steps, exact, strict=True)])

    computes = torch.autocast(device, autocast) if autocast is not None else contextlib.nullcontext()
    with packed_attention(model, compute_dtype=autocast), computes:
        eager = run()
        with compiled_layers(model, _backend=backend) as layers:
            compiled = run()
    assert all(kind.path != "eager" for kind in layers.kinds), layers.reason
    mean_error, mean_budget = (values.square().mean(0).sqrt() for values in (compiled, eager))
    rounding = torch.finfo(autocast or torch.float32).eps / 2
    assert (mean_error <= 2 * mean_budget + rounding).all(), (mean_error, mean_budget)
    return layers


def cast_adapters(model: Any, autocast: torch.dtype | None) -> Any:
    from fastpack_trl.lora.linear import apply_lora

    report = apply_lora(model, compute_dtype=autocast)
    assert report.fast, str(report)
    return report


@contextlib.contextmanager
def compiled(model: Any, backend: Any = None, *, attention: str | None = None, **options: Any) -> Iterator[Any]:
    """Packed attention and compiled layers around steps, as training has them."""
    given = () if attention is None else (attention,)
    with packed_attention(model, *given):
        with compiled_layers(model, _backend=backend or Counting(), **options) as layers:
            yield layers


def compile_with(backend: Any, patch: pytest.MonkeyPatch) -> None:
    """Let every feature that compiles layers use this backend."""
    patch.setitem(compiled_layers.__wrapped__.__kwdefaults__, "_backend", backend)  # type: ignore[attr-defined]


def stop(*_args: Any) -> Any:
    raise RuntimeError("no compiler here")
