"""Captured micro-steps: which rows are recorded and replayed, and what they add; replays by the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import CAPTURED, STEPS, assert_same_run, both, build
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.bench.compare import compare
from fastpack_trl.capture import decision, graphs
from fastpack_trl.testing import tiny_model


@pytest.mark.parametrize(
    ("family", "lora"),
    [("llama", False), ("gemma3_text", True), ("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", False)],
)
def test_a_captured_run_trains_as_an_eager_one(tmp_path: Path, devices: Any, family: str, lora: bool) -> None:
    ours, eager = both(tmp_path, devices, family=family, lora=lora)
    (device,) = devices.made
    assert device.log.count("record") >= 1
    assert device.log.count("replay") >= STEPS - decision.EAGER_STEPS - 2 * graphs.WARM_ROWS - 1, device.log
    assert device.log[0] == "apart"
    assert device.log[-1] == "forget"
    assert device.log.count("reset") == device.log.count("record")
    assert_same_run(ours, eager)
    line = ours.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("on", "captured")
    assert "3.00 GiB" in line.reason
    assert "of rows fit" in line.reason


@pytest.mark.parametrize("merged", ["off", "on"])
def test_accumulation_is_several_replays_or_one_of_a_merged_row(tmp_path: Path, devices: Any, merged: str) -> None:
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 12}
    ours, eager = both(tmp_path, devices, fast={"merge_accumulation": merged}, **options)
    replays = devices.made[0].log.count("replay")
    assert replays >= (5 if merged == "on" else 3 * 5)
    assert_same_run(ours, eager)


def test_data_of_which_few_tokens_count_has_loss_buckets(tmp_path: Path, devices: Any) -> None:
    ours, eager = both(tmp_path, devices, data="prompt_completion", max_steps=12)
    assert devices.made[0].log.count("replay") >= 3
    assert_same_run(ours, eager)


def test_evaluation_between_replays_changes_nothing(tmp_path: Path, devices: Any) -> None:
    logs = both(tmp_path, devices, eval_strategy="steps", eval_steps=2)
    assert devices.made[0].log.count("replay") >= 2
    assert_same_run(*logs)


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit", "adamw_torch"])
def test_steps_of_bitsandbytes_are_ordered_with_captured_ones(tmp_path: Path, devices: Any, optim: str) -> None:
    if "torch" not in optim:
        pytest.importorskip("bitsandbytes")
    ours, eager = both(tmp_path, devices, optim=optim)
    assert_same_run(ours, eager)
    assert ours.fastpack_report["cuda_graph"].path == "captured"
    ordered = [entry for entry in devices.made[0].log if entry.startswith(("order", "leave"))]
    assert ordered == ([] if "torch" in optim else ["order AdamW", "leave AdamW"])


def test_gradients_are_as_in_stock_between_steps(tmp_path: Path, devices: Any) -> None:
    """None after `zero_grad`; a parameter that no loss reaches never gets one, which AdamW would take for zeros."""
    seen: list[tuple[bool, bool]] = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen.append((model.unused.grad is None, all(p.grad is not None for p in model.model.parameters())))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            assert all(p.grad is None for p in model.parameters())

    model = tiny_model("qwen3")
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[Looks()], model=model, weight_decay=0.1)
    trainer.train()
    assert devices.made[0].log.count("replay") >= 2
    assert seen == [(True, True)] * STEPS
    assert torch.equal(model.unused, torch.ones(3))


def test_a_comparison_has_the_losses_of_captured_steps(tmp_path: Path, devices: Any) -> None:
    def make(cls: type[SFTTrainer], config: type[SFTConfig], **changes: Any) -> SFTTrainer:
        args = settings(tmp_path, packing=True, eval_strategy="no") | changes
        fast = CAPTURED if config is FastSFTConfig else {}
        trainer = cls(
            tiny_model("qwen3"), args=config(**args, **fast), train_dataset=make_dataset("text", 300),
            processing_class=make_tokenizer(),
        )  # fmt: skip
        devices.options["model"] = trainer.model
        return trainer

    found = compare(make, timed=3, warmup=12, rounds=1, progress=False)
    (row,) = found["rows"]
    assert devices.made[0].log.count("replay") >= 2
    assert row["sides"]["fastpack"]["losses"] == pytest.approx(row["sides"]["stock"]["losses"], rel=1e-5)


def test_a_replay_adds_the_gradients_of_all_adapters_by_one_operator(tmp_path: Path, devices: Any) -> None:
    options = {"lora": True, "gradient_accumulation_steps": 2, "fast": {"merge_accumulation": "off"}}
    tapes: list[list[Any]] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            slots = trainer.fastpack_run.get_state(graphs.BackboneGraphs)._slots.values()
            tapes.extend(slot.backward._operations for slot in slots if slot.backward is not None)

    trainer = build(FastSFTTrainer, tmp_path / "ours", devices, callbacks=[Looks()], **options)
    trainer.train()
    pointers = {p.data_ptr() for p in trainer.model.parameters() if p.requires_grad}
    assert len(pointers) == 2 * 7 * 2
    names = [func.overloadpacket.__name__ for func, *_ in tapes[-1]]
    assert names.count("_foreach_add_") == 1
    (added,) = (args[0] for func, args, *_ in tapes[-1] if func.overloadpacket.__name__ == "_foreach_add_")
    assert len(added) == len(pointers)
    shapes = {p.shape for p in trainer.model.parameters() if p.requires_grad}
    single = [args for func, args, *_ in tapes[-1] if func.overloadpacket.__name__ == "add_"]
    assert not [args for args in single if args[0].dtype == torch.float32 and args[0].shape in shapes]
    eager = build(FastSFTTrainer, tmp_path / "eager", devices, **options | {"fast": {"cuda_graph": "off"}})
    eager.train()
    assert_same_run(trainer, eager)
