"""Rows of the training cases: a model of public shape with random weights, real text, and how it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.lora_models import ALPHA, RANK, LoraModel, build, definitions, files
from benchmarks.model_shapes import build_model, shape_of
from fastpack_trl.moe.quantised import quantize_experts

LONGEST_DOCUMENT = 2048
"""Tokens; longer ones are cut, so that rows of 8,192 tokens hold several."""
FILE_ROWS = 80
"""Rows of long documents: more than the steps that a run of `benchmarks.side_by_side` can have."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model and row length: ``Row("qwen3-8b", 4096, "lora")``."""

    model: str
    tokens: int
    kind: str
    """``lora`` (bf16 base), ``nf4``, ``full`` (bf16 weights), ``experts`` (LoRA on attention and expert stacks)
    or ``nf4-experts`` (LoRA on attention, frozen expert stacks in four bits)."""
    layers: int | None = None
    unpacked: tuple[int, int] | None = None
    """Documents of a batch and batches of a step, where rows are not packed; else a packed row is a step."""
    whole_files: bool = False
    """Documents are source files of up to a row, not functions and classes of up to `LONGEST_DOCUMENT`."""

    @property
    def name(self) -> str:
        if self.unpacked is not None:
            return f"{self.model} {self.kind} {self.unpacked[0]}x{self.unpacked[1]}"
        return f"{self.model} {self.kind} {self.tokens}{' long documents' if self.whole_files else ''}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `SFTConfig` that say what a step is."""
        batch, batches = self.unpacked or (1, 1)
        return {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": batches,
            "packing": self.unpacked is None, "max_length": self.tokens,
        }  # fmt: skip

    def precision(self, device: str) -> dict[str, Any]:
        """Return the arguments of `SFTConfig` that say in which dtype it trains."""
        return {"bf16": device == "cuda"}


SMALL = Row("small", 512, "lora")
"""For a CPU: it shows that a case runs."""
ROWS = {
    row.name: row
    for row in (
        Row("qwen3-0.6b", 2048, "lora"), Row("qwen3-0.6b", 8192, "lora"), Row("llama-3.2-1b", 4096, "full"),
        Row("qwen3-8b", 4096, "lora"), Row("qwen3-14b", 4096, "nf4"), Row("gpt-oss-20b", 4096, "experts", 4),
        Row("qwen3-0.6b", 1024, "lora", unpacked=(2, 4)), Row("qwen3-8b", 1024, "lora", unpacked=(2, 4)),
        Row("qwen3-30b-a3b", 4096, "experts", 4), Row("qwen3-32b", 2048, "nf4"),
        Row("qwen3-8b", 8192, "lora"), Row("qwen3-14b", 4096, "lora"),
        Row("qwen3-8b", 32_768, "lora", whole_files=True), SMALL, Row("small", 512, "lora", unpacked=(2, 4)),
        Row("small", 1024, "lora", whole_files=True), Row("tiny-qwen3", 256, "nf4"), Row("tiny-qwen3", 256, "full"),
        Row("tiny-gpt-oss", 256, "experts"),
        Row("llama-3.2-1b", 2048, "full"), Row("qwen3-8b", 4096, "nf4"),
    )
} | {
    "gpt-oss-20b experts 4096 whole": Row("gpt-oss-20b", 4096, "experts", 24),
    "qwen3-30b-a3b experts 4096 half": Row("qwen3-30b-a3b", 4096, "experts", 24),
}  # fmt: skip
"""By the name that ``--rows`` takes. Rows of ``small`` and ``tiny`` models are for a CPU: one of each kind."""
FIRST = tuple(ROWS)[:6]
"""What is measured first: packed rows of each kind of training."""


def layers_of(row: str) -> str:
    """Return the decoder layers of a row, and those of the public model: ``4 of 24``."""
    shape = shape_of(ROWS[row].model).cut_to(ROWS[row].layers)
    return f"{shape.layers} of {shape.published_layers}"


def material(row: Row, device: str, seed: int) -> dict[str, Any]:
    """Return a trainer's model, data, tokenizer and adapters for `row`."""
    model, peft_config = model_of(row, row.tokens, device, seed)
    tokenizer, documents = documents_of(row, int(model.config.get_text_config().vocab_size))
    return {"model": model, "train_dataset": documents, "processing_class": tokenizer, "peft_config": peft_config}


def model_of(row: Row, positions: int, device: str, seed: int) -> tuple[Any, Any]:
    """Return the model of `row` for rows of up to `positions` tokens, and the adapters that a trainer is to put in."""
    if row.kind in ("lora", "nf4"):
        base = "bf16" if row.kind == "lora" else row.kind
        return build(LoraModel(row.model, base), layers=row.layers, positions=positions, seed=seed, device=device), None
    model = base_of(row, positions, device, seed)
    if row.kind == "full":
        return model, None
    if row.kind == "nf4-experts":
        quantize_experts(model.requires_grad_(False))
    return model, lora_of_experts(stacks=row.kind == "experts")


def lora_of_experts(*, stacks: bool, **more: Any) -> Any:
    """Return the adapters of a mixture of experts: of its attention, and of its stacks of experts too."""
    from peft import LoraConfig

    of_stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if stacks else None
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=attention, target_parameters=of_stacks, **more)


def base_of(row: Row, positions: int, device: str, seed: int) -> Any:
    """Return the model of `row` in bf16, without adapters."""
    shape = replace(shape_of(row.model).cut_to(row.layers), weights=torch.bfloat16)
    return build_model(shape, positions=positions, seed=seed, device=device)


def documents_of(row: Row, vocabulary: int) -> tuple[Any, Any]:
    """Return the tokenizer and the documents of `row`."""
    if row.whole_files:
        return files(row.tokens * FILE_ROWS, vocabulary, row.tokens)
    return definitions(row.tokens * 120, vocabulary, min(row.tokens, LONGEST_DOCUMENT))
