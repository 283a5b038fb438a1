"""Runs on images whose decoder is captured below its eager tower: equal to eager runs and to TRL, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import CAPTURED
from peft import LoraConfig
from side_by_side import assert_equal
from trainer_material import assert_line, callback, figures
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer

LORA = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


class Gradients(list[dict[str, Any]]):
    """The gradients of each step by name; a parameter without one has None."""

    @property
    def callback(self) -> Any:
        def keep(state: Any, model: Any) -> None:
            own = model.named_parameters()
            self.append({name: None if p.grad is None else p.grad.clone() for name, p in own if p.requires_grad})

        return callback("on_pre_optimizer_step", keep)()


def train(folder: Path, devices: Any, family: str, cls: Any = FastSFTTrainer, **fields: Any) -> tuple[Any, Gradients]:
    """A run of few images per step; of ours it is captured."""
    seen, config = Gradients(), SFTConfig
    if cls is FastSFTTrainer:
        config, fields = FastSFTConfig, CAPTURED | fields
    base = {"max_steps": 14, "per_device_train_batch_size": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    base |= {"weight_decay": 0.1, "callbacks": [seen.callback]}
    data, model = fields.pop("data", None) or image_data(12, family=family), fields.pop("model", None)
    model = composite(family, torch.float64) if model is None else model
    trainer = run(cls, config, folder, family, model, data, train=False, **base | fields)
    devices.options["model"] = trainer.model
    trainer.train()
    return trainer, seen


def assert_same_steps(ours: Gradients, eager: Gradients, rtol: float = 1e-5) -> None:
    assert len(ours) == len(eager)
    for step, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        absent = [{name for name, gradient in found.items() if gradient is None} for found in (mine, theirs)]
        assert absent[0] == absent[1], step
        most = max(float(each.abs().max()) for each in theirs.values() if each is not None)
        for name, gradient in theirs.items():
            if gradient is not None:
                assert float((mine[name] - gradient).abs().max()) <= rtol * most, (step, name)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("qwen2_5_vl", "llava", "mistral3", "internvl", "smolvlm", "qwen3_5")},
    "qwen2_5_vl-lora": ("qwen2_5_vl", {"peft_config": LORA}),
    "llava-lora": ("llava", {"peft_config": LORA}),
    "accumulated": ("qwen2_5_vl", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_captured_run_on_images_trains_as_an_eager_one_and_as_trl(case: str, tmp_path: Path, devices: Any) -> None:
    family, fields = RUNS[case]
    ours, mine = train(tmp_path / "on", devices, family, **fields)
    eager, theirs = train(tmp_path / "off", devices, family, cuda_graph="off", **fields)
    stock, _ = train(tmp_path / "trl", devices, family, SFTTrainer, **fields)
    log = devices.made[0].log
    print(case, log, ours.fastpack_report["cuda_graph"])
    assert_line(ours, "cuda_graph", status="on", path="captured")
    assert_same_steps(mine, theirs)
    for other in (eager, stock):
        assert_equal(figures(ours), figures(other), rtol=1e-5, atol=1e-5)
        print(differences(ours, other))
