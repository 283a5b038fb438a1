"""Edits of a batch after collation, by a subclass, a loader or a hook, count as in stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edited_batches as at
import pytest
import torch
from edited_batches import Edit, Place
from peft import LoraConfig
from shared_material import prefixed
from step_material import ONE_LOG, BetweenLogs
from torch import Tensor
from trainer_material import assert_same_log, build, make_dataset, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, PackingCollator, packed_attention
from fastpack_trl.packing.batching import packing_collator
from fastpack_trl.step.merging import merge_inputs
from fastpack_trl.testing import tiny_model

BOTH = (FastSFTTrainer, SFTTrainer)
ROWS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "per_device_train_batch_size": 2},
    "padding_free": {},
    "merged": {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_length": 64},
}


def replaced(inputs: Any) -> None:
    """Count two of three labels; in a row of documents also some first tokens, which then are predicted as in stock."""
    ids = inputs["input_ids"]
    labels = inputs["labels"].masked_fill(ids % 3 == 0, -100)
    inputs["labels"] = labels.where(ids % 7 != 1, ids)


def in_place(inputs: Any) -> None:
    ids = inputs["input_ids"]
    inputs["labels"][ids % 3 == 0] = -100
    inputs["labels"][ids % 7 == 1] = ids[ids % 7 == 1]


def shifted_labels(inputs: Any) -> None:
    labels = inputs["labels"]
    inputs["shift_labels"] = torch.cat([labels[:, 1:], labels[:, :1]], dim=1).masked_fill(labels % 5 == 0, -100)


def cut_short(inputs: Any) -> None:
    total = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == total:
            inputs[name] = value[:, : total * 2 // 3]


def sets(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda inputs: inputs.__setitem__(name, change(inputs[name]))


def without(*names: str) -> Edit:
    return lambda inputs: [inputs.pop(name, None) for name in names]


joined_documents = sets("position_ids", lambda positions: torch.arange(positions.shape[1])[None])
shorter_documents = sets("position_ids", lambda positions: positions.remainder_(7))
shifted_documents = sets("position_ids", lambda positions: positions + 3)
OURS = ("packed_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
EDITED, MOVED = "or edited after collation: their positions", "such rows run the attention of the model"
EDITS: dict[str, tuple[Edit, str]] = {
    "labels": (replaced, EDITED),
    "labels in place": (in_place, EDITED),
    "shift_labels": (shifted_labels, EDITED),
    "ids": (sets("input_ids", lambda ids: ids.clamp(max=70)), ""),
    "ids in place": (sets("input_ids", lambda ids: ids.clamp_(max=70)), ""),
    "positions copied": (sets("position_ids", torch.clone), ""),
    "documents joined": (joined_documents, MOVED),
    "documents cut in place": (shorter_documents, MOVED),
    "documents shifted": (shifted_documents, MOVED),
    "no packed_batch": (without("packed_batch"), "a batch without packed_batch"),
    "no metadata": (without(*OURS), "a batch without packed_batch"),
    "no position_ids": (without("position_ids"), ""),
    "doubled": (sets("log_probs", lambda values: 2 * values), "for a forward hook on Qwen3ForCausalLM"),
}


def run(cls: type[SFTTrainer], folder: Path, *, trainer: Any = None, fast: Any = None, **options: Any) -> Any:
    given = {
        "max_steps": 3, "optim": "sgd", "learning_rate": 0.2, "eval_strategy": "steps", "eval_steps": 2,
        "data": make_dataset("tokens", 40),
    }  # fmt: skip
    trainer = {"eval_dataset": make_dataset("tokens", 6, seed=7)} | (trainer or {})
    fast = {"verify_packing": "off"} | (fast or {}) if issubclass(cls, FastSFTTrainer) else None
    torch.manual_seed(0)
    return train(cls, folder, fast=fast, trainer=trainer, **given | options)


OTHER = [edit for edit in EDITS if edit not in ("labels", "labels in place", "no position_ids", "doubled")]


@pytest.mark.parametrize(
    ("rows", "edit", "place"),
    [
        *(("packed", "labels", place) for place in at.PLACES),
        *(("merged", "labels in place", place) for place in (at.in_prediction_step, at.in_a_loader, at.in_a_worker)),
        *(("merged", "labels in place", place) for place in (at.in_a_hook, at.in_training_step)),
        *(("merged", "labels", place) for place in (at.in_a_worker, at.in_a_forward)),
        *(("padding_free", "labels", place) for place in (at.in_compute_loss, at.in_a_loader)),
        *(("merged", edit, at.in_a_loader) for edit in OTHER),
        ("merged", "documents cut in place", at.in_a_worker),
        *(("merged", "documents joined", place) for place in (at.in_a_hook, at.in_compute_loss)),
        ("packed", "no position_ids", at.in_prediction_step),
        *((rows, "doubled", at.in_the_outputs) for rows in ROWS),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_edits_count_as_in_stock_and_are_reported(rows: str, edit: str, place: Place, tmp_path: Path) -> None:
    change, reason = EDITS[edit]
    options = ROWS[rows] | ({"dataloader_num_workers": 1} if place is at.in_a_worker else {})
    if place is at.in_the_outputs:
        options |= {"eval_strategy": "no", "max_steps": 4}
    ours, stock = (run(place(cls, change), tmp_path, **options) for cls in BOTH)
    assert_same_log(ours, stock, rtol=2e-5, atol=5e-6)
    torch.testing.assert_close(ours.model.state_dict(), stock.model.state_dict(), rtol=1e-4, atol=1e-6)
    report = ours.fastpack_report
    text = str(report.to_dict())
    assert reason or MOVED not in text
    padded = rows == "padding_free" and place is not at.in_the_outputs
    assert (report["batches"].status == "stock") == padded, report
    assert (reason in text) != padded, report
    if (rows, reason) == ("merged", EDITED) and edit != "shift_labels":
        merging = report["merge_accumulation"]
        merges = place in (at.in_prediction_step, at.in_a_forward, at.in_a_loader, at.in_a_worker)
        assert (merging.status == "on") == merges, report
        assert ("changed after collation" in merging.reason) == (place in (at.in_a_loader, at.in_a_worker)), report
        assert ("forward pre-hook" in merging.reason) == (place is at.in_a_hook), report


CUT = r"of \d+ tokens for a row of \d+ .*give one row, uncut"
SHARED: dict[str, Any] = {"data": prefixed(), "fast": {"share_prefixes": "on"}}


@pytest.mark.parametrize(
    ("edit", "place", "options", "message"),
    [
        (without("position_ids"), at.in_compute_loss, {}, "'attention_mask' or 'position_ids'"),
        (sets("labels", lambda labels: labels[:, :20]), at.in_compute_loss, {}, r"labels of shape \(1, 20\) .*: cut"),
        (without("labels"), at.in_a_hook, {}, "'NoneType' object is not subscriptable"),
        (cut_short, at.in_compute_loss, {}, CUT),
        (cut_short, at.in_a_loader, {}, CUT),
        (shifted_documents, at.in_a_loader, SHARED, "set share_prefixes='off'"),
        (shorter_documents, at.in_a_loader, SHARED, "set share_prefixes='off'"),
    ],
)
def test_edits_that_cannot_run_are_errors(edit: Edit, place: Place, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run(place(FastSFTTrainer, edit), tmp_path, **ROWS["packed"] | options)


ROW = {"input_ids": list(range(5, 25)), "labels": [-100] * 4 + list(range(9, 25)), "seq_lengths": [12, 8]}


def test_tensors_without_a_counter_are_known_by_identity() -> None:
    with torch.inference_mode():
        inputs = copy.deepcopy(PackingCollator(pad_token_id=0)([ROW]))
        assert inputs["labels"].is_inference()
        assert inputs["packed_batch"].counts(inputs["labels"])
        assert not inputs["packed_batch"].counts(inputs["labels"].clone())


def assert_no_edit(trainer: Any) -> None:
    reasons = " ".join(line.reason for line in trainer.fastpack_report)
    assert "collation" not in reasons
    assert "a batch without" not in reasons


LORA = {**ROWS["packed"], "trainer": {"peft_config": LoraConfig(r=2)}, "bf16": True}


@pytest.mark.parametrize(
    "options", [{"dataloader_num_workers": 1, **ROWS["merged"]}, {"dataloader_num_workers": 1}, LORA], ids=str
)
def test_runs_without_edits_report_none(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = run(FastSFTTrainer, tmp_path, **options)
    assert_no_edit(trainer)
    assert trainer.fastpack_report["batches"].status == "on"


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("workers", [0, 2])
def test_on_cuda_unedited_batches_are_not_reported_and_cost_no_sync(rows: str, workers: int, tmp_path: Path) -> None:
    counter = BetweenLogs(error=True)
    options = ROWS[rows] | {"dataloader_num_workers": workers, "use_cpu": False, "bf16": True}
    options |= {name: value for name, value in ONE_LOG.items() if name != "packing"}
    trainer = run(FastSFTTrainer, tmp_path, trainer={"callbacks": [counter]}, **options)
    assert counter.per_micro_batch == 0, counter.syncs
    trainer.evaluate()
    assert_no_edit(trainer)


def test_edited_positions_are_named_once_under_the_stock_trainer(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3")
    with packed_attention(model), caplog.at_level("WARNING"):
        for _ in range(2):
            inputs = PackingCollator(pad_token_id=0)([ROW, ROW])
            joined_documents(inputs)
            actual = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    expected = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert sum(MOVED in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("merged", [False, True], ids=["", "merged"])
def test_labels_of_shared_rows_count_as_edited(merged: bool, tmp_path: Path) -> None:
    runner = build(FastSFTTrainer, tmp_path, data=prefixed(), fast={}, packing=True, max_length=120)
    sums = []
    for shares in (True, False):
        collator = packing_collator(runner, share_prefixes=shares)
        rows = [collator([row]) for row in runner.train_dataset.with_format("numpy")][:3]
        assert not shares or all(row["packed_batch"].documents for row in rows)
        inputs = merge_inputs(rows) if merged else rows[0]
        inputs["labels"][:, ::3] = -100
        with packed_attention(runner.model):
            out = runner.model(**inputs, loss_batch=inputs["packed_batch"], loss_type="nll")
        assert out.is_edited
        out.total.backward()
        sums.append([out.total.detach(), *(p.grad for p in runner.model.parameters())])
        runner.model.zero_grad()
    for ours, whole in zip(*sums, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
