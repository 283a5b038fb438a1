"""What users set and give, one case each: equal to stock, or stock, and named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from preference_material import assert_same, both, build, trained
from trainer_material import assert_line
from transformers import BatchEncoding
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastpack_trl
from fastpack_trl.testing import tiny_model

SHORT = {"max_steps": 2, "eval_steps": 2}


def on_rows(trainer: Any) -> bool:
    return trainer.fastpack_report["batches"].status == "on" and trainer._fastpack_rows.ran > 0


@pytest.mark.parametrize("edited", [False, True])
def test_a_copied_batch_is_known_an_edited_not(edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several processes run on CPUs KTO copies its batch to ``cpu:0``, and tensors are never there."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: torch.device("cpu:0")))
    edits: list[bool] = []

    def edit(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        if edited:
            inputs["input_ids"][:, -1] = 5
            edits.append(True)
        return logps(self, model, inputs, *args)

    logps = trl.KTOTrainer._compute_kl_logps
    # As if TRL had written it.
    home = vars(sys.modules[trl.KTOTrainer.__module__])
    as_trls = FunctionType(edit.__code__, home, edit.__name__, None, edit.__closure__)
    monkeypatch.setattr(trl.KTOTrainer, "_compute_kl_logps", as_trls)
    ours, stock = both("KTO", tmp_path, **SHORT)
    rows = ours._fastpack_rows
    assert rows.ran > 0
    said = "gets tokens that no batch has" in ours.fastpack_report["batches"].reason
    assert (rows.missed > 0) == said == edited == bool(edits)
    assert_same(ours, stock)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_prompt_learning_is_stocks(config: Any, tmp_path: Path) -> None:
    adapter = config(task_type="CAUSAL_LM", num_virtual_tokens=3)
    # Prefixes are keys and values, which transformers' checkpointing drops: stock ends in its first step with it.
    ours, stock = both("DPO", tmp_path, trainer={"peft_config": adapter}, gradient_checkpointing=False, **SHORT)
    assert not on_rows(ours)
    assert "prompt learning" in ours.fastpack_report["batches"].reason
    assert_same(ours, stock)


def test_dropout_is_not_shared_but_packed_and_evaluation_shares(tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    ours = build("GRPO", tmp_path, fast=True, trainer={"peft_config": adapter}, **SHORT)
    ours.train()
    assert_line(ours, "share_prefixes", "lora_dropout 0.1", "set it to 0", status="off")
    assert on_rows(ours)


def test_a_subclass_with_a_loss_of_its_own_is_stocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(fastpack_trl.FastDPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            return 2 * super()._compute_loss(model, inputs, return_outputs)

    monkeypatch.setattr(fastpack_trl, "FastDPOTrainer", Doubled, raising=False)
    ours = build("DPO", tmp_path, fast=True, lora=False, max_steps=1, eval_strategy="no")
    ours.train()
    assert "_compute_loss of Doubled may expect the rows that TRL makes" in ours.fastpack_report["batches"].reason
    assert ours.state.log_history[0]["loss"] == pytest.approx(2 * 0.6931472, abs=1e-5)


def test_a_hook_of_the_user_sees_padded_rows(tmp_path: Path) -> None:
    ours, rows = build("DPO", tmp_path, fast=True, **SHORT), set[int]()
    layer = ours.model.get_base_model().model.layers[0]
    layer.register_forward_hook(lambda _module, args, _output: rows.add(args[0].shape[0]))
    ours.train()
    assert "may expect the rows that TRL makes" in ours.fastpack_report["batches"].reason
    assert rows == {4, 6, 8}


def test_disabled_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_DISABLE", "1")
    ours, stock = both("DPO", tmp_path, **SHORT)
    assert ours.fastpack_report["fastpack"].status == "off"
    assert_same(ours, stock, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_configs_of_ours_have_the_fields_that_apply(name: str, tmp_path: Path) -> None:
    config, own = getattr(fastpack_trl, f"Fast{name}Config"), {"lora": "off", "packed_attention": "per_document"}
    ours = build(name, tmp_path, fast=True, config=config, share_prefixes=False, **own, **SHORT)
    ours.train()
    assert ours.fastpack_report["share_prefixes"].reason == "switched off"
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    with pytest.raises(ValueError, match="share_prefixes='sometimes' is not available"):
        config(output_dir=str(tmp_path), share_prefixes="sometimes", use_cpu=True, bf16=False)


def test_the_plan_of_checkpointing_stays_after_calls_of_the_reference(tmp_path: Path) -> None:
    """TRL's own pause ends with checkpointing on in every layer."""
    ours = build("DPO", tmp_path, fast=True, **SHORT)
    layers = ours.model.get_base_model().model.layers
    seen: list[list[bool]] = []

    class Watch(trl.trainer.callbacks.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            layers[0].gradient_checkpointing = False

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append([layer.gradient_checkpointing for layer in layers])

    ours.add_callback(Watch())
    ours.train()
    assert seen == [[False, True]] * 2


def test_a_trainer_leaves_the_model_and_trl_as_they_were(tmp_path: Path) -> None:
    module = trl.trainer.dpo_trainer
    before = module.add_fused_lm_head, module.disable_gradient_checkpointing
    ours = build("DPO", tmp_path, fast=True, **SHORT)
    ours.train()
    assert (module.add_fused_lm_head, module.disable_gradient_checkpointing) == before
    assert ours.model.config._attn_implementation == tiny_model("qwen3").config._attn_implementation
    assert type(ours.data_collator) is module.DataCollatorForPreference
    count = ours._fastpack_rows.ran
    ours.compute_loss(ours.model, ours._prepare_inputs(ours.data_collator([ours.train_dataset[0]])))
    assert ours._fastpack_rows.ran == count


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO"])
def test_a_run_resumes_where_stock_resumes(name: str, tmp_path: Path) -> None:
    made = []
    for fast in (True, False):
        folder = tmp_path / str(fast)
        first = build(name, folder, fast=fast, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="no")
        first.train()
        again = build(name, folder, fast=fast, max_steps=2, save_strategy="no", eval_strategy="no")
        again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        made.append(again)
    assert_same(*made)
    mine, theirs = (trained(each.model) for each in made)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "policy", "reference"),
    [("DPO", "qwen3", "granitemoehybrid"), ("DPO", "qwen3_next", "qwen3_next"), ("GRPO", "qwen3_next", "")],
)
def test_models_that_cannot_share_repeat_prompts(name: str, policy: str, reference: str, tmp_path: Path) -> None:
    """Layers with a state would take a prompt's second completion for a continuation of the first."""

    def given() -> dict[str, Any]:
        return {"trainer": {"ref_model": tiny_model(reference, seed=1)} if reference else {}}

    ours, stock = both(name, tmp_path, given, family=policy, lora=False, **SHORT)
    assert_line(
        ours, "share_prefixes", status="off", reason="layers with a recurrent state cannot branch after a prompt"
    )
    assert_same(ours, stock, atol=2e-5)


class Positions(DataCollatorForPreference):  # type: ignore[misc]
    def torch_call(self, examples: Any) -> Any:
        batch = super().torch_call(examples)
        return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


class Encoded(DataCollatorForPreference):  # type: ignore[misc]
    def torch_call(self, examples: Any) -> Any:
        return BatchEncoding(super().torch_call(examples))


@pytest.mark.parametrize("collator", [Positions, Encoded])
def test_collators_of_the_user_train_as_in_stock(collator: Any, tmp_path: Path) -> None:
    """Own positions keep batches padded, a mapping that is no dictionary does not."""
    ours, stock = both("DPO", tmp_path, lambda: {"trainer": {"data_collator": collator(pad_token_id=0)}}, **SHORT)
    assert on_rows(ours) == (collator is Encoded)
    assert ("position_ids of a collator" in ours.fastpack_report["batches"].reason) != on_rows(ours)
    assert_same(ours, stock)


def test_kept_workers_of_an_evaluation_collate_by_the_plan_of_the_next(tmp_path: Path) -> None:
    kept = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    off = {"config": fastpack_trl.FastDPOConfig, "packed_attention": "off"}
    trainer = build("DPO", tmp_path, fast=True, **off, **kept, **SHORT)
    trainer.evaluate()
    assert not trainer._fastpack_rows.ran
    trainer.args.packed_attention = "auto"
    trainer.evaluate()
    assert on_rows(trainer)
