"""TRL's examples of supervised fine-tuning: tiny models of their families, and their rows in `docs/trl-scripts.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from moe_material import model_without_gates
from sft_material import TEMPLATE, make_tokenizer, write_jsonl
from trainer_material import sentences

from fastpack_trl.report import FeatureReport
from fastpack_trl.testing import tiny_model

SCRIPTS = Path(__file__).parents[1] / "scripts" / "trl"
PAGE = Path(__file__).parents[2] / "docs" / "trl-scripts.md"

EXAMPLES = {
    "sft_full": ("`trl/scripts/sft.py`, full", "Qwen2; packed; 2 rows, accumulation 8; evaluation"),
    "sft_lora": ("`trl/scripts/sft.py`, LoRA", "as above; LoRA r 32 on PEFT's default layers, dropout 0.05"),
    "example_config": ("`examples/cli_configs/example_config.yaml`", "Qwen2; not packed; 8 documents; text"),
    "sft_gpt_oss": ("`examples/scripts/sft_gpt_oss.py`", "gpt-oss, all weights; packed; 2 rows"),
    "gpt_oss_lora": (
        "OpenAI's cookbook for gpt-oss with TRL",
        "gpt-oss; LoRA r 8 on all linear layers and the experts of some; not packed; 4 documents, accumulation 4",
    ),
    "sft_gemma3": (
        "`examples/scripts/sft_gemma3.py`",
        "Gemma 3 with its vision tower, all weights, `eager`; conversations without images; 1 document, accumulation 8",
    ),
    "sft_nemotron_3": (
        "`examples/scripts/sft_nemotron_3.py` and its notebook",
        "Nemotron-H: Mamba, attention, experts; LoRA r 8, dropout 0.05; 1 document, accumulation 4; 8-bit AdamW",
    ),
    "sft_tiny_aya_tool_calling": (
        "`examples/scripts/sft_tiny_aya_tool_calling.py`",
        "Cohere 2 in NF4; LoRA r 32 on all linear layers; 1 document, accumulation 4; 8-bit AdamW",
    ),
    "lora_notebook": (
        "`examples/notebooks/sft_trl_lora_qlora.ipynb`, LoRA",
        "Qwen3; LoRA r 32 on all linear layers; 1 document, accumulation 4; 8-bit AdamW",
    ),
    "qlora_notebook": ("`examples/notebooks/sft_trl_lora_qlora.ipynb`, QLoRA", "as above, in NF4"),
}
"""Script -> its name at its source, and the settings that matter."""

OFF_ON_A_CPU = {
    "activation_memory": "cpu has no memory of its own: activation_memory_gib=... plans for a budget",
    "checkpoint_offload": "not needed: checkpoint_offload='double_buffer' trades host memory for device memory",
    "share_prefixes": "little to share, tokens computed: 100% of the documents' tokens",
    "layer_compile": "on cpu compiling takes longer than most runs; layer_compile='on' compiles",
    "cuda_graph": "the model is on cpu: its work is not queued by a host that a graph could relieve",
}
"""Feature -> the reason for which it is off on a CPU in any of the scripts."""

HEADING = "| script | settings | on | off or as stock, and why |\n| --- | --- | --- | --- |\n"


def row(name: str, report: FeatureReport) -> str:
    """Return the line of the table for a script that ran on a CPU."""
    on, others = [], []
    for line in report:
        if line.status == "on":
            part = line.path if line.feature in ("packed_attention", "batches", "sync_free") else ""
            on.append(f"`{line.feature}`" + (f" ({part})" if part else ""))
        elif OFF_ON_A_CPU.get(line.feature) != line.reason:
            others.append(f"`{line.feature}`: {line.reason}")
    source, settings = EXAMPLES[name]
    return f"| {source} | {settings} | {', '.join(sorted(on))} | {'; '.join(sorted(others)) or 'nothing'} |\n"


def off_on_a_cpu() -> str:
    """Return the table of what is off on a CPU in every script."""
    rows = [f"| `{feature}` | {reason} |\n" for feature, reason in OFF_ON_A_CPU.items()]
    return "| feature | reason on a CPU |\n| --- | --- |\n" + "".join(rows)


def save_material(folder: Path) -> Path:
    """Write ``models`` and ``data`` as the scripts name them; return `folder`."""
    # bitsandbytes on a CPU packs blocks of 64 numbers.
    blocks = {"vocab_size": 304, "hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    models = {
        "qwen2": tiny_model("qwen2", vocab_size=304),
        "qwen3": tiny_model("qwen3", **blocks),
        "cohere2": tiny_model("cohere2", **blocks),
        "gpt_oss": tiny_model("gpt_oss", vocab_size=304),
        "nemotron_h": model_without_gates(vocab_size=304),
        "gemma3": _gemma3(),
    }
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    for name, model in models.items():
        model.save_pretrained(folder / "models" / name)
        (_gemma3_processor() if name == "gemma3" else tokenizer).save_pretrained(folder / "models" / name)
    pairs = list(zip(sentences(40, 0, 6), sentences(40, 1, 12), strict=True))
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in pairs
    ]
    write_jsonl(folder / "data" / "text.jsonl", [{"text": answer} for _, answer in pairs])
    write_jsonl(folder / "data" / "messages.jsonl", [{"messages": both} for both in turns])
    return folder


def _gemma3() -> Any:
    from transformers import AutoModelForImageTextToText, Gemma3Config

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=tiny_model("gemma3_text", vocab_size=304).config.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_index=300, boi_token_index=301, eoi_token_index=302,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).float()


def _gemma3_processor() -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>", extra_special_tokens=special)
    images = Gemma3ImageProcessor(size={"height": 28, "width": 28})
    return Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)
