"""What users set and give, one case each: equal to stock, or stock, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from preference_material import assert_same, both, build, name_on_disk, pairs, trained
from trainer_material import make_tokenizer, sentences

import fastpack_trl
from fastpack_trl.testing import tiny_model

SHORT = {"max_steps": 2, "eval_steps": 2}
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def answers(chosen: list[str], rejected: list[str]) -> Dataset:
    prompts = [f"{text} " for text in sentences(len(chosen), 0, 40)]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def on_rows(trainer: Any) -> bool:
    return trainer.fastpack_report["batches"].status == "on" and trainer._fastpack_rows.ran > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_dpo(loss: str, tmp_path: Path) -> None:
    smoothing = {"label_smoothing": 0.1} if loss in ("exo_pair", "robust") else {}
    ours, stock = both("DPO", tmp_path, loss_type=[loss], **smoothing, **SHORT)
    assert on_rows(ours)
    assert_same(ours, stock, atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"f_divergence_type": "forward_kl"}, id="forward_kl"),
        pytest.param({"f_divergence_type": "js_divergence"}, id="js"),
        pytest.param({"f_divergence_type": "alpha_divergence"}, id="alpha"),
        pytest.param({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, id="two losses"),
        pytest.param({"ld_alpha": 0.5}, id="ld_alpha"),
        pytest.param({"use_weighting": True}, id="weighting"),
        pytest.param({"precompute_ref_log_probs": True}, id="precomputed"),
        pytest.param({"precompute_ref_log_probs": True, "lora": False}, id="precomputed, full"),
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 1, "lora": False}, id="synced"),
        pytest.param({"max_length": 24}, id="cut at the end"),
        pytest.param({"max_length": 24, "truncation_mode": "keep_end"}, id="cut at the beginning"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param({"gradient_checkpointing": False}, id="no checkpointing"),
        pytest.param({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, id="reentrant"),
        pytest.param({"pad_to_multiple_of": 16}, id="padded to a multiple"),
        pytest.param({"family": "qwen3_moe", "router_aux_loss_coef": 0.1}, id="auxiliary loss"),
        pytest.param({"family": "gemma2"}, id="softcap"),
        pytest.param({"dataloader_num_workers": 1}, id="worker"),
        pytest.param(
            # Its gradients cancel: Adam would make steps of their rounding.
            {"data": answers(sentences(20, 1, 9), sentences(20, 1, 9)), "optim": "sgd"},
            id="equal completions",
        ),
        pytest.param(
            {"data": answers(sentences(20, 1, 9), [f"{text} w1 w2" for text in sentences(20, 1, 9)])}, id="a beginning"
        ),
        pytest.param({"data": answers(sentences(20, 1, 9), [""] * 20)}, id="empty completions"),
        pytest.param({"data": pairs(prompt=4)}, id="short prompts"),
    ],
)
def test_dpo_on_rows_logs_what_stock_logs(options: dict[str, Any], tmp_path: Path) -> None:
    ours, stock = both("DPO", tmp_path, **{**SHORT, **options})
    assert on_rows(ours), ours.fastpack_report
    assert_same(ours, stock)


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward"])
def test_padding_that_is_the_end_of_text(name: str, tmp_path: Path) -> None:
    tokenizers = [make_tokenizer() for _ in range(2)]
    for tokenizer in tokenizers:
        tokenizer.pad_token = tokenizer.eos_token
    made = []
    for fast, tokenizer in zip((True, False), tokenizers, strict=True):
        runner = build(name, tmp_path / str(fast), fast=fast, trainer={"processing_class": tokenizer}, **SHORT)
        runner.train()
        made.append(runner)
    assert on_rows(made[0])
    assert_same(*made)


def test_rewards_with_margins(tmp_path: Path) -> None:
    data = pairs().add_column("margin", [0.1 * index for index in range(20)])
    ours, stock = both("Reward", tmp_path, data=data, evaluated=data, center_rewards_coefficient=0.01, **SHORT)
    assert on_rows(ours)
    assert_same(ours, stock)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("precomputed", [False, True])
def test_every_loss_of_kto(loss: str, precomputed: bool, tmp_path: Path) -> None:
    ours, stock = both("KTO", tmp_path, loss_type=loss, precompute_ref_log_probs=precomputed, **SHORT)
    assert on_rows(ours)
    assert_same(ours, stock)


@pytest.mark.parametrize("edited", [False, True])
def test_a_batch_that_is_copied_on_its_way_is_known_and_an_edited_one_is_stocks(
    edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where several processes run on CPUs KTO copies its batch to ``cpu:0``, and tensors are never there."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: torch.device("cpu:0")))
    edits: list[bool] = []

    def edit(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        if edited:
            inputs["input_ids"][:, -1] = 5
            edits.append(True)
        return logps(self, model, inputs, *args)

    logps = trl.KTOTrainer._compute_kl_logps
    monkeypatch.setattr(trl.KTOTrainer, "_compute_kl_logps", edit)
    edit.__module__ = trl.KTOTrainer.__module__
    ours, stock = both("KTO", tmp_path, **SHORT)
    rows = ours._fastpack_rows
    assert rows.ran > 0
    assert (rows.missed > 0) == edited == bool(edits)
    assert_same(ours, stock)


def test_two_adapters_of_which_one_is_the_reference(tmp_path: Path) -> None:
    made = []
    for fast in (True, False):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(tiny_model("qwen3"), config)
        runner = build("DPO", tmp_path / str(fast), fast=fast, model=model, trainer={"peft_config": None}, **SHORT)
        runner.train()
        made.append(runner)
    assert "ref" in made[0].model.peft_config
    assert on_rows(made[0])
    assert_same(*made)


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
    line = ours.fastpack_report["share_prefixes"]
    assert line.status == "off"
    assert "lora_dropout 0.1" in line.reason
    assert "0 shares" in line.reason
    assert on_rows(ours)


@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_evaluation_with_metrics_has_stocks_logits(name: str, tmp_path: Path) -> None:
    def width(prediction: Any) -> dict[str, float]:
        return {"width": float(prediction.predictions.shape[1])}

    ours, stock = both(name, tmp_path, trainer={"compute_metrics": width}, **SHORT)
    assert on_rows(ours)
    assert_same(ours, stock)


def test_a_subclass_with_a_loss_of_its_own_is_stocks(tmp_path: Path) -> None:
    class Doubled(fastpack_trl.FastDPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            return 2 * super()._compute_loss(model, inputs, return_outputs)

    ours = Doubled(
        tiny_model("qwen3"), args=trl.DPOConfig(**_plain(tmp_path)), train_dataset=pairs(),
        processing_class=make_tokenizer(), ref_model=tiny_model("qwen3"),
    )  # fmt: skip
    ours.train()
    assert "_compute_loss of Doubled may expect the rows that TRL makes" in ours.fastpack_report["batches"].reason
    assert ours.state.log_history[0]["loss"] == pytest.approx(2 * 0.6931472, abs=1e-5)


def _plain(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }


def test_a_hook_of_the_user_sees_padded_rows(tmp_path: Path) -> None:
    shapes = []
    ours = build("DPO", tmp_path, fast=True, **SHORT)
    ours.model.get_base_model().model.layers[0].register_forward_hook(
        lambda module, args, output: shapes.append(args[0].shape[0])
    )
    ours.train()
    assert "may expect the rows that TRL makes" in ours.fastpack_report["batches"].reason
    assert set(shapes) == {4, 6, 8}


def test_disabled_is_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_DISABLE", "1")
    ours, stock = both("DPO", tmp_path, **SHORT)
    assert ours.fastpack_report["fastpack"].status == "off"
    assert ours._fastpack_rows.ran == 0
    assert_same(ours, stock, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO", "RLOO"])
def test_configs_of_ours_have_the_fields_that_apply(name: str, tmp_path: Path) -> None:
    config = getattr(fastpack_trl, f"Fast{name}Config")
    ours = build(
        name,
        tmp_path,
        fast=True,
        config=config,
        share_prefixes=False,
        lora="off",
        packed_attention="per_document",
        **SHORT,
    )
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


def test_a_reference_that_is_given_by_name(tmp_path: Path) -> None:
    made = []
    for fast in (True, False):
        folder = tmp_path / str(fast)
        model = tiny_model("qwen3")
        name_on_disk(model, folder)
        runner = build("DPO", folder, fast=fast, model=model, lora=False, trainer={"ref_model": None}, **SHORT)
        runner.train()
        made.append(runner)
    assert on_rows(made[0])
    assert_same(*made)


def test_a_reference_that_cannot_share_has_prompts_repeated_for_both(tmp_path: Path) -> None:
    """Layers with a state would take a prompt's second completion for a continuation of the first."""
    runs = []
    for fast in (True, False):
        folder = tmp_path / str(fast)
        reference = tiny_model("granitemoehybrid", seed=1)
        runner = build("DPO", folder, fast=fast, lora=False, trainer={"ref_model": reference}, **SHORT)
        runner.train()
        runs.append(runner)
    ours, stock = runs
    line = ours.fastpack_report["share_prefixes"]
    assert (line.status, line.reason) == ("off", "layers with a state go through a row once")
    assert_same(ours, stock, atol=2e-5)


def test_a_policy_with_layers_that_have_a_state_has_prompts_repeated(tmp_path: Path) -> None:
    ours, stock = both("DPO", tmp_path, family="qwen3_next", lora=False, **SHORT)
    line = ours.fastpack_report["share_prefixes"]
    assert (line.status, line.reason) == ("off", "layers with a state go through a row once")
    assert_same(ours, stock, atol=2e-5)
