"""A step asks the device nothing between two logs, and logs what stock logs."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from step_material import ONE_LOG, BetweenLogs
from trainer_material import assert_line, assert_same_log, both, build, callback, figures, train
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTTrainer
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from fastpack_trl import FastSFTTrainer, PackedBatch
from fastpack_trl.features.sync_free import why_stock_loss
from fastpack_trl.step.loss import LossForward
from fastpack_trl.testing import tiny_model

LORA = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")}
PROMPT = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
FULL: dict[str, Any] = {}
LOSS = "loss, metrics, host work"
SEQUENCE = SimpleNamespace(tp_size=1, cp_size=1, sp_size=2)


def counted(cls: type[SFTTrainer], folder: Path, model: Any, method: dict[str, Any], **more: Any) -> BetweenLogs:
    counter = BetweenLogs()
    train(cls, folder, model=model, trainer={"callbacks": [counter], **method}, **ONE_LOG | more)
    return counter


@pytest.mark.parametrize(
    ("family", "layers", "method", "steps"),
    [("qwen3", 2, FULL, 4), ("qwen3", 4, LORA, 1), ("qwen3_moe", 4, FULL, 1), ("qwen3_moe", 2, LORA, 4)],
)
def test_no_sync_between_two_logs(family: str, layers: int, method: dict[str, Any], steps: int, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=layers)
    if family == "qwen3_moe":
        # What the eager experts ask the device is theirs, and not of the step.
        model.set_experts_implementation("batched_mm")
    same = copy.deepcopy(model)
    seen = counted(FastSFTTrainer, tmp_path, model, method, gradient_accumulation_steps=steps)
    assert seen.per_micro_batch == 0, seen.syncs
    if layers == 2:
        stock = counted(SFTTrainer, tmp_path, same, method, gradient_accumulation_steps=steps)
        assert stock.per_micro_batch >= 5, stock.syncs


@pytest.mark.parametrize("options", [
    {"family": "qwen3"},
    {"family": "qwen3", "loss_type": "dft"},
    {"family": "qwen3_moe"},
    {"family": "deepseek_v3"},
    {"family": "mixtral", "router_aux_loss_coef": 0.5, "gradient_accumulation_steps": 2},
    {"family": "gemma2", "model": {"final_logit_softcapping": 2.0}},
    {"family": "granite", "model": {"logits_scaling": 4.0}},
    {"family": "cohere2", "model": {"logit_scale": 0.5}},
    {"family": "gpt_oss", "fast": {"packed_attention": "off", "verify_packing": "off"}},
    {"family": "qwen3", "average_tokens_across_devices": False, "gradient_accumulation_steps": 2, "logging_steps": 3,
     "max_steps": 5},
    {"family": "qwen3", "trainer": LORA, "pad_to_multiple_of": 16},
], ids=str)  # fmt: skip
def test_log_equals_that_of_stock(options: dict[str, Any], tmp_path: Path) -> None:
    fields = {"gradient_checkpointing": False, "data": "prompt_completion", "packing": True} | options
    model = tiny_model(fields["family"], **fields.pop("model", {}))
    ours, stock = both(tmp_path, **fields, model=model)
    assert_same_log(ours, stock)
    assert_line(ours, "sync_free", path="host work only" if "fast" in options else LOSS)


def test_without_positions_the_forward_is_trls() -> None:
    model = tiny_model("qwen3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    trls, signature = model.forward, inspect.signature(model.forward)
    ids = torch.randint(3, 90, (2, 9))
    expected = model(ids, labels=ids, fused_lm_head=True).log_probs
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    layer = LossForward(model)
    assert layer.in_place
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(ids, labels=ids, fused_lm_head=True).log_probs, expected)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), generated)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_output_embeddings().weight.zero_()
    labels = torch.tensor([[-100, 5, -100, -100, -100, 7, -100, -100, -100]])
    chosen = {"labels": labels, "loss_batch": PackedBatch.from_lengths([9], labels=labels), "loss_type": "nll"}
    assert twin(ids[:1], **chosen).entropy.tolist() == pytest.approx([math.log(96)] * 2)  # its own head
    model.forward = trls
    assert not layer.in_place
    add_fused_lm_head(twin, outputs=("log_probs", "entropy", "is_top1"), temperature=0.5)
    assert "with a temperature" in LossForward(twin).missing


def test_micro_batches_without_a_loss_are_those_of_stock(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(5, 17)), "labels": [-100] * 12}, {"input_ids": list(range(7, 19))}]
    for row in rows[1:]:
        row["labels"] = row["input_ids"]
    dataset = Dataset.from_list(rows * 6)
    ours, stock = both(
        tmp_path, data=dataset, trainer={"eval_dataset": dataset.select(range(3))}, packing=True, max_length=12,
        per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    assert_same_log(ours, stock)
    assert any(row["entropy"] > 0 for row in figures(ours) if "entropy" in row)


def test_an_empty_evaluation_set_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    trainer = train(FastSFTTrainer, tmp_path, packing=True, max_steps=2, eval_strategy="no")
    with pytest.raises(ValueError, match="eval data set is empty"):
        trainer.evaluate(trainer.train_dataset.select([]))
    assert trainer.evaluate()["eval_entropy"] > 0


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    losses = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:], reduction="sum")
    return losses / (1 if num_items_in_batch is None else num_items_in_batch)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fast": {"packed_attention": "off"}}, "packed_attention is off"),
        ({"label_smoothing_factor": 0.1}, "label smoothing needs the full logits"),
        ({"trainer": {"compute_loss_func": summed}}, "compute_loss_func needs the full logits"),
        ({"trainer": PROMPT}, "each document"),
    ],
)
def test_what_needs_stock_runs_as_stock_and_says_why(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    options = {"packing": True, "data": "prompt_completion"} | options
    ours = train(FastSFTTrainer, tmp_path, **options)
    if options.get("trainer") is not PROMPT:  # whose packing leaks in stock
        assert_same_log(ours, train(SFTTrainer, tmp_path, **options | {"fast": None}))
    assert_line(ours, "sync_free", reason, path="host work only")


@pytest.mark.parametrize("name", ["compute_loss_func", "label_smoother"])
def test_a_loss_that_a_callback_sets_is_that_of_the_steps_after_it(name: str, tmp_path: Path) -> None:
    def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.float().pow(2).mean()

    def change(state: Any, _model: Any) -> None:
        if state.global_step == 2:
            setattr(sides[-1], name, squared if name == "compute_loss_func" else LabelSmoother(epsilon=0.3))

    sides: list[Any] = []
    for cls in (FastSFTTrainer, SFTTrainer):
        own = {"callbacks": [callback("on_step_begin", change)()]}
        sides.append(build(cls, tmp_path, packing=True, gradient_accumulation_steps=2, eval_strategy="no", trainer=own))
        sides[-1].train()
    assert_same_log(*sides)
    assert "on rows as collated: it was set in the middle" in sides[0].fastpack_report["sync_free"].reason


def test_whoever_reads_the_metrics_between_two_logs_reads_those_of_stock(tmp_path: Path) -> None:
    def read(_state: Any, _model: Any) -> None:
        metrics = trainer._metrics["train"]
        seen[-1].append((trainer._total_train_tokens, len(metrics["entropy"]), list(metrics)))

    seen: list[Any] = []
    for cls in (FastSFTTrainer, SFTTrainer):

        class Subclass(cls):  # type: ignore[misc, valid-type]
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().compute_loss(*args, **kwargs)
                self._metrics["train"]["squared"].append(self._metrics["train"]["mean_token_accuracy"][-1] ** 2)
                return loss

        seen.append([])
        options = {"packing": True, "logging_steps": 2, "eval_strategy": "no"}
        trainer = build(Subclass, tmp_path, trainer={"callbacks": [callback("on_step_end", read)()]}, **options)
        trainer.train()
        assert "squared" in trainer.state.log_history[0]
    assert seen[0] == seen[1]
    assert seen[0][0][0] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: (vars(trainer), "is_fsdp_enabled", True), "FSDP version 1 flattens the head"),
        (lambda trainer: (vars(trainer.model), "hf_device_map", {"a": 0, "b": "cpu"}), "model is spread over 0, cpu"),
        (lambda trainer: (vars(trainer.model.lm_head.weight), "ds_id", 3), "ZeRO-3 shards the head"),
        (lambda trainer: (vars(trainer.accelerator.state), "parallelism_config", SEQUENCE), "sequence parallelism"),
    ],
    ids=["fsdp1", "devices", "zero3", "sequence"],
)
def test_what_one_process_on_a_cpu_cannot_run_goes_to_stock_by_name(
    change: Callable[[Any], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=False)
    trainer: Any = build(FastSFTTrainer, tmp_path, model=model, data="tokens", packing=True)
    with trainer._fastpack_features():
        assert why_stock_loss(trainer.fastpack_run) == ""
        monkeypatch.setitem(*change(trainer))
        assert reason in why_stock_loss(trainer.fastpack_run)


@pytest.mark.cuda
def test_fp16_scales_its_loss_as_in_stock_and_says_that_it_asks(tmp_path: Path) -> None:
    ours, stock = both(tmp_path, packing=True, fp16=True, use_cpu=False)
    assert_same_log(ours, stock, rtol=2e-2, atol=2e-2)
    assert "the loss scaler of fp16 synchronizes once per optimizer step" in (ours.fastpack_report["sync_free"].reason)


@pytest.mark.cuda
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("method", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_cuda_never_waits(family: str, layers: int, method: dict[str, Any], accumulation: int, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=layers)
    if family == "qwen3_moe":
        model = model.to(torch.bfloat16)  # torch's grouped products in fp32 wait for the sizes of the groups
    counter = BetweenLogs(error=True)
    train(
        FastSFTTrainer, tmp_path, model=model, trainer={"callbacks": [counter], **method}, use_cpu=False, bf16=True,
        gradient_accumulation_steps=accumulation, **ONE_LOG,
    )  # fmt: skip
    assert counter.per_micro_batch == 0, counter.syncs


PADDED = "evaluation of padded batches, or with predictions, is TRL's"


def of_stock(cls: type[SFTTrainer], what: str) -> Any:
    """Return a trainer whose loss is TRL's: its batches have an attention mask, or it asks for outputs."""

    class Own(cls):  # type: ignore[valid-type,misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            if what == "mask":
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
                return super().compute_loss(model, inputs, return_outputs, **keywords)
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keywords)
            return (loss, outputs) if return_outputs else loss

    return Own


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("outputs", "TRL's loss and metrics if compute_loss is called with return_outputs=True"),
        ("mask", "TRL's loss and metrics for rows with an attention mask or without position_ids"),
    ],
)
def test_what_trls_loss_takes_is_named(what: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"packing": False, "padding_free": True, "max_length": None, "eval_strategy": "no"}
    ours, stock = (
        train(of_stock(cls, what), tmp_path / cls.__name__, per_device_train_batch_size=1, **options)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock)
    assert ours.fastpack_report["sync_free"].reason.count(text) == 1
    assert caplog.text.count(text) == 1


def test_what_asks_the_device_and_predictions_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"compute_metrics": lambda prediction: {"rows": len(prediction.predictions)}}
    ours, stock = both(tmp_path, packing=True, include_num_input_tokens_seen="all", trainer=metrics)
    assert_same_log(ours, stock)
    reason = ours.fastpack_report["sync_free"].reason
    assert reason.count("evaluation with compute_metrics is TRL's") == 1
    assert "include_num_input_tokens_seen synchronizes" in reason
    assert PADDED not in reason
    trainer = build(FastSFTTrainer, tmp_path, eval_strategy="no")
    with caplog.at_level(logging.WARNING):
        trainer.predict(trainer.train_dataset)
    assert PADDED in trainer.fastpack_report["sync_free"].reason
    assert caplog.text.count(PADDED) == 1
    trainer.train()
    reason = trainer.fastpack_report["sync_free"].reason
    assert PADDED not in reason
    assert "compute_metrics" not in reason


def test_if_trl_has_other_tiles_its_loss_runs_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = chunked_logprob._backward_tile
    monkeypatch.setattr(chunked_logprob, "_backward_tile", lambda *args, **kwargs: known(*args, **kwargs))
    ours, stock = both(tmp_path, packing=True, trainer=LORA)
    assert_same_log(ours, stock)
    assert "trl lacks trl.kernels.chunked_logprob._backward_tile" in ours.fastpack_report["sync_free"].reason
