"""TRL's own examples on tiny models: the same log as under TRL's trainer, and what is on in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from model_material import gemma3, gemma3_processor, hybrid_model
from peft import LoraConfig, get_peft_model
from sft_material import TEMPLATE, make_tokenizer, write_jsonl
from side_by_side import assert_equal
from trainer_material import figures, sentences
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.report import FeatureReport
from fastpack_trl.testing import tiny_model

PAGE = Path(__file__).parents[1] / "docs" / "trl-scripts.md"
Options = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A script of TRL's: what it gives its trainer."""

    model: str
    config: Options
    load: Options | None = None
    """Arguments of `from_pretrained`; None where the trainer loads the model."""
    lora: Options | None = None
    data: str = "messages"
    held_out: float = 0.0
    """Part of the data for evaluation."""
    is_quantised: bool = False

    def train(self, cls: type[SFTTrainer], material: Path, folder: Path, **lora: Any) -> SFTTrainer:
        """Train three steps in `folder` on what `save_material` has written, with other fields of the adapter."""
        torch.manual_seed(0)  # of adapters that a script makes before its trainer
        model: Any = str(material / "models" / self.model)
        adapter = None if self.lora is None else LoraConfig(**self.lora | lora)
        if self.load is not None:
            auto = AutoModelForImageTextToText if self.model == "gemma3" else AutoModelForCausalLM
            four_bits = {"quantization_config": BitsAndBytesConfig(**NF4)} if self.is_quantised else {}
            model = auto.from_pretrained(model, **self.load | four_bits)
        if self.lora is not None and "target_parameters" in self.lora:
            model, adapter = get_peft_model(model, adapter), None
        data = load_dataset("json", data_files=str(material / f"data/{self.data}.jsonl"), split="train")
        parts = data.train_test_split(self.held_out, seed=0) if self.held_out else {"train": data, "test": None}
        args = SFTConfig(
            output_dir=str(folder / "out"), max_steps=3, logging_steps=1, use_cpu=True,
            **({} if self.is_quantised else {"bf16": False}) | self.config,
        )  # fmt: skip
        trainer = cls(model, args, train_dataset=parts["train"], eval_dataset=parts["test"], peft_config=adapter)
        trainer.train()
        trainer.save_model(str(folder / "out"))
        return trainer


def rows(count: int, accumulation: int = 1) -> Options:
    return {"per_device_train_batch_size": count, "gradient_accumulation_steps": accumulation}


PACKED: Options = {"packing": True} | rows(2)
SCRIPT: Options = PACKED | rows(2, 8) | {"max_length": 32, "eos_token": "<eos>", "eval_strategy": "steps"}
SCRIPT |= {"eval_steps": 2, "model_init_kwargs": {"dtype": "float32"}}
COSINE: Options = {"warmup_steps": 0.03, "lr_scheduler_type": "cosine_with_min_lr"}
COSINE |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
CHECKPOINTS: Options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
EIGHT_BITS = rows(1, 4) | {"learning_rate": 2e-4, "optim": "paged_adamw_8bit"}
NOTEBOOK = EIGHT_BITS | {"warmup_steps": 5, "max_length": 1024, "gradient_checkpointing": True}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
R32: Options = {"r": 32, "lora_alpha": 32, "target_modules": LINEAR}
EAGER: Options = {"attn_implementation": "eager", "dtype": "float32"}
SDPA: Options = {"attn_implementation": "sdpa", "dtype": torch.float32}
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float16, "bnb_4bit_use_double_quant": True}
NF4 |= {"bnb_4bit_quant_type": "nf4"}
COOKBOOK = COSINE | rows(4, 4) | {"learning_rate": 2e-4, "gradient_checkpointing": True, "max_length": 2048}
TEXT = {"model_init_kwargs": {"dtype": "float32"}, "report_to": "none", "learning_rate": 1e-4}
STACKS = [f"1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
EXPERTS = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "target_parameters": STACKS}
DEFAULT = {"r": 32, "lora_alpha": 16, "lora_dropout": 0.05}
SCRIPTS, NOTEBOOKS = "`examples/scripts", "`examples/notebooks"

LEAKS = f"{SCRIPTS}/sft_gpt_oss.py`"
"""Stock lets the documents of its packed rows see each other on a CPU: there is no log to compare with."""
EXAMPLES = {
    "`trl/scripts/sft.py`, full": Example("qwen2", SCRIPT | {"learning_rate": 2e-5}, held_out=0.2),
    "`trl/scripts/sft.py`, LoRA": Example("qwen2", SCRIPT | {"learning_rate": 2e-4}, lora=DEFAULT, held_out=0.2),
    "`examples/cli_configs/example_config.yaml`": Example("qwen2", TEXT | {"lr_scheduler_type": "cosine"}, data="text"),
    LEAKS: Example("gpt_oss", PACKED | COSINE | {"max_length": 160, "seed": 42}, EAGER | {"use_cache": False}),
    "OpenAI's cookbook for gpt-oss with TRL": Example("gpt_oss", COOKBOOK, EAGER | {"use_cache": False}, EXPERTS),
    f"{SCRIPTS}/sft_gemma3.py`": Example(
        "gemma3", CHECKPOINTS | rows(1, 8) | {"max_length": 8192}, {"attn_implementation": "eager"}
    ),
    f"{SCRIPTS}/sft_nemotron_3.py` and its notebook": Example(
        "nemotron_h", EIGHT_BITS | {"max_length": 128, "model_init_kwargs": EAGER},
        lora={"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": LINEAR},
    ),
    f"{SCRIPTS}/sft_tiny_aya_tool_calling.py`": Example(
        "cohere2", NOTEBOOK | CHECKPOINTS, SDPA | {"dtype": torch.float16}, R32, held_out=0.5, is_quantised=True
    ),
    f"{NOTEBOOKS}/sft_trl_lora_qlora.ipynb`, LoRA": Example("qwen3", NOTEBOOK, SDPA, R32),
    f"{NOTEBOOKS}/sft_trl_lora_qlora.ipynb`, QLoRA": Example(
        "qwen3", NOTEBOOK, SDPA | {"dtype": torch.bfloat16}, R32, is_quantised=True
    ),
}  # fmt: skip
"""The name of each at its source."""

ROWS, ON_A_CPU = (
    dict(re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)[2:])
    for table in PAGE.read_text(encoding="utf-8").split("Off in every script")
)
"""The page's tables: script -> all other cells; feature -> the reason for which it is off on a CPU in every script."""
EVERYWHERE = re.findall(r"^On in every script: (.*)\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)[0]


def cells(report: FeatureReport) -> str:
    """Return the last two cells of the row of a script that ran on a CPU."""
    on, others = [], []
    for line in report:
        if line.status == "on":
            part = line.path if line.feature in ("packed_attention", "batches", "sync_free") else ""
            on.append(f"`{line.feature}`" + (f" ({part})" if part else ""))
        elif ON_A_CPU.get(f"`{line.feature}`") != line.reason:
            others.append(f"`{line.feature}`: {line.reason}")
    assert ", ".join(sorted(part for part in on if part in EVERYWHERE)) == EVERYWHERE
    here = sorted(part for part in on if part not in EVERYWHERE)
    return f"{', '.join(here)} | {'; '.join(sorted(others)) or 'nothing'}"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``models`` and ``data`` as the scripts name them."""
    folder = tmp_path_factory.mktemp("examples")
    # bitsandbytes on a CPU packs blocks of 64 numbers.
    blocks = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    models = {
        family: tiny_model(family, vocab_size=304, **blocks if family in ("qwen3", "cohere2") else {})
        for family in ("qwen2", "qwen3", "cohere2", "gpt_oss")
    }
    models |= {"nemotron_h": hybrid_model("nemotron_h", vocab_size=304), "gemma3": gemma3()}
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE)
    for name, model in models.items():
        model.save_pretrained(folder / "models" / name)
        (gemma3_processor() if name == "gemma3" else tokenizer).save_pretrained(folder / "models" / name)
    questions, answers = sentences(40, 0, 6), sentences(40, 1, 12)
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers, strict=True)
    ]
    write_jsonl(folder / "data" / "text.jsonl", [{"text": answer} for answer in answers])
    write_jsonl(folder / "data" / "messages.jsonl", [{"messages": both} for both in turns])
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_logs_as_stock_and_has_on_what_the_page_says(name: str, material: Path, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    if example.is_quantised or "8bit" in example.config.get("optim", ""):
        pytest.importorskip("bitsandbytes")
    ours = example.train(FastSFTTrainer, material, tmp_path / "ours")
    expected = cells(ours.fastpack_report)
    assert ROWS[name].endswith(f" | {expected}"), f"the line of {name} in {PAGE.name} should end:\n{expected}"
    if name == LEAKS:
        assert ours.fastpack_proof.proven
        return
    dropless = {"lora_dropout": 0.0}  # the draws depend on the shape of a batch
    if example.lora and example.lora.get("lora_dropout"):
        ours = example.train(FastSFTTrainer, material, tmp_path / "exact", **dropless)
    stock = example.train(SFTTrainer, material, tmp_path / "stock", **dropless)
    rtol = 2**-7 if example.is_quantised else 1e-5
    assert len(figures(stock)) >= 4
    assert_equal(figures(ours), figures(stock), rtol, rtol / 5)
    assert files(tmp_path / "ours") == sorted([*files(tmp_path / "stock"), "out/fastpack_report.json"])


def test_the_page_has_a_line_for_each_script_and_no_other() -> None:
    assert [*ROWS] == [*EXAMPLES]
