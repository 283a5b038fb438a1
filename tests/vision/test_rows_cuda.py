"""Rows of images on a GPU: errors no larger than those of padded batches; no layer waits or loops over documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import assert_as_close_as_eager_runs, keeping
from counted_operators import kernels_of
from peft import LoraConfig
from trainer_material import assert_line
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data, processor
from vision_runs import run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.capture import graphs
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.model.upstream import DataCollatorForVisionLanguageModeling
from fastpack_trl.vision.rows import ImageRows

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("options", [{}, {"image_row_tokens": 96}, {"activation_memory": "off"}], ids=str)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "mistral3"])
def test_bf16_has_at_most_twice_the_error_of_the_padded_batch(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    data = image_data(family=family)
    step = {"max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": False, "gradient_checkpointing": True}
    ours = run(
        FastSFTTrainer, FastSFTConfig, tmp_path, family, composite(family), data, bf16=True, **step, **options
    )  # fmt: skip
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, composite(family), data, bf16=True, **step)
    exact = run(SFTTrainer, SFTConfig, tmp_path, family, composite(family, torch.float64), data, **step)
    assert_line(ours, "vision_rows", status="on")
    assert ours.fastpack_run.attention_path == "varlen"
    steps = [
        {name: (trainer.before[name] - p.detach()).double() for name, p in trainer.model.named_parameters()}
        for trainer in (ours, stock, exact)
    ]
    for name, right in steps[2].items():
        off, own = ((found[name] - right).norm() for found in steps[:2])
        assert off <= 2 * own + 1e-3 * right.norm() + 1e-9, name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_neither_waits_nor_kernels_of_a_layer_depend_on_the_number_of_documents(family: str) -> None:
    def seen(repeats: int, count: int) -> tuple[int, int]:
        model, data = (
            composite(family, torch.bfloat16, repeats=repeats).cuda(),
            image_data(count, family=family, images=1),
        )
        collate = ImageRows(DataCollatorForVisionLanguageModeling(processor(family), completion_only_loss=True), model)
        row = collate([dict(each) for each in data])
        row.pop("labels")

        def step() -> None:
            model(**row.to("cuda"), use_cache=False).logits.sum().backward()

        with packed_attention(model) as attention:
            assert attention.path == "varlen"
            step()
            with count_host_syncs() as waits:
                step()
            return kernels_of(step), waits.total

    (few, few_waits), (many, many_waits) = (zip(*(seen(depth, n) for depth in (1, 2)), strict=True) for n in (4, 12))
    assert few[1] - few[0] == many[1] - many[0] > 0
    assert few_waits[0] == few_waits[1]
    assert many_waits[0] == many_waits[1]


ON_DEVICE = {"use_cpu": False, "bf16": True}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_a_captured_decoder_differs_from_an_eager_one_as_eager_runs_do(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters in decoder and tower, whose gradients come out of replays, and micro-batches without images."""

    def go(name: str) -> tuple[Any, ...]:
        gradients: dict[str, torch.Tensor] = {}
        adapters = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        options = {"optim": "adamw_torch", "learning_rate": 1e-4, "max_grad_norm": 1.0, "cuda_graph": "on", **ON_DEVICE}
        options |= {"max_steps": 30, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        options |= {"peft_config": adapters, "callbacks": [keeping(gradients)]}
        given = (family, composite(family), image_data(120, family=family))
        ours = run(FastSFTTrainer, FastSFTConfig, tmp_path / name, *given, **options)
        losses = [row["loss"] for row in ours.state.log_history if "loss" in row]
        return losses, gradients, ours.fastpack_report["cuda_graph"]

    captured = go("a")
    monkeypatch.setattr(graphs, "WARM_ROWS", 10**9)  # the same static shapes, and nothing is recorded
    assert_as_close_as_eager_runs(captured, [go(name) for name in "bcd"])
