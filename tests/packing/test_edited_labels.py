"""Edits of a batch after collation, by a subclass, a loader or a hook, count as in stock."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_material import prefixed
from step_material import ONE_LOG, BetweenLogs
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from trainer_material import assert_same_log, build, make_dataset
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl import FastSFTTrainer, PackingCollator, packed_attention
from fastpack_trl.packing.batching import packing_collator
from fastpack_trl.step.accumulation import merge_inputs
from fastpack_trl.testing import tiny_model

Edit = Callable[[dict[str, Any]], None]
EDITED = "labels were moved, replaced or edited after collation"


def replaced(inputs: dict[str, Any]) -> None:
    """Count two of three labels; in a row of documents also some first tokens, which then are predicted as in stock."""
    ids = inputs["input_ids"]
    labels = inputs["labels"].masked_fill(ids % 3 == 0, -100)
    inputs["labels"] = labels.where(ids % 7 != 1, ids)


def in_place(inputs: dict[str, Any]) -> None:
    ids = inputs["input_ids"]
    inputs["labels"][ids % 3 == 0] = -100
    inputs["labels"][ids % 7 == 1] = ids[ids % 7 == 1]


def in_method(name: str) -> Any:
    """Edit what a method of the trainer gets, whose arguments begin with model and inputs."""

    def place(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
        def method(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            edit(inputs)
            return getattr(cls, name)(self, model, inputs, *args, **kwargs)

        return type("Trainer", (cls,), {name: method})

    place.__name__ = f"in_{name}"
    return place


in_compute_loss, in_training_step, in_prediction_step = map(
    in_method, ("compute_loss", "training_step", "prediction_step")
)


def in_prepare_inputs(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    def method(self: Any, inputs: Any) -> Any:
        inputs = cls._prepare_inputs(self, inputs)
        edit(inputs)
        return inputs

    return type("Trainer", (cls,), {"_prepare_inputs": method})


def in_get_batch_samples(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = cls.get_batch_samples(self, *args, **kwargs)
        for inputs in batches:
            edit(inputs)
        return batches, items

    return type("Trainer", (cls,), {"get_batch_samples": method})


class _Edited:
    """A data loader whose batches are edited as they come."""

    def __init__(self, loader: Any, edit: Edit) -> None:
        self.loader, self.edit = loader, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for inputs in self.loader:
            self.edit(inputs)
            yield inputs


def in_a_loader(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    return type("Trainer", (cls,), {"get_train_dataloader": lambda self: _Edited(cls.get_train_dataloader(self), edit)})


def _collate_and_edit(collate: Any, edit: Edit, rows: Any) -> Any:
    inputs = collate(rows)
    edit(inputs)
    return inputs


def in_a_worker(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    """Before the batch is handed over by a worker and placed."""

    def method(self: Any) -> Any:
        loader: Any = cls.get_train_dataloader(self)
        inner = loader.base_dataloader
        inner.collate_fn = functools.partial(_collate_and_edit, inner.collate_fn, edit)
        return loader

    return type("Trainer", (cls,), {"get_train_dataloader": method})


def in_a_hook(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    class Trainer(cls):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model.register_forward_pre_hook(self._edit, with_kwargs=True)

        @staticmethod
        def _edit(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if kwargs.get("labels") is not None:
                edit(kwargs)
            return args, kwargs

    return Trainer


PLACES = [
    in_compute_loss, in_training_step, in_prediction_step, in_prepare_inputs, in_get_batch_samples, in_a_loader,
    in_a_hook,
]  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "per_device_train_batch_size": 2},
    "padding_free": {},
    "merged": {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
}


def make(
    cls: type[SFTTrainer], folder: Path, *, trainer: dict[str, Any] | None = None, fast: dict[str, Any] | None = None,
    rows: int = 16, **options: Any,
) -> Any:  # fmt: skip
    fast = fast if issubclass(cls, FastSFTTrainer) else None
    trainer = {"eval_dataset": make_dataset("tokens", 6, seed=7)} | (trainer or {})
    options = {"max_steps": 2, "eval_strategy": "no"} | options
    return build(cls, folder, data=make_dataset("tokens", rows), fast=fast, trainer=trainer, **options)


def run(cls: type[SFTTrainer], folder: Path, *, evaluates: bool = True, **options: Any) -> Any:
    strategy = {"eval_strategy": "steps", "eval_steps": 2} if evaluates else {"eval_strategy": "no"}
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.2, "fast": {"verify_packing": "off"}}
    torch.manual_seed(0)
    runner = make(cls, folder, rows=40, **(given | strategy | options))
    runner.train()
    return runner


def assert_same_run(ours: Any, stock: Any) -> None:
    assert_same_log(ours, stock, rtol=2e-5, atol=5e-6)
    expected = stock.model.state_dict()
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)


def compare(place: Any, edit: Edit, folder: Path, **options: Any) -> Any:
    ours = run(place(FastSFTTrainer, edit), folder, **options)
    assert_same_run(ours, run(place(SFTTrainer, edit), folder, **options))
    return ours


@pytest.mark.parametrize(
    ("rows", "edit"),
    [("packed", replaced), ("padding_free", replaced), ("merged", in_place)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_labels_edited_on_their_way_count_as_in_stock(rows: str, place: Any, edit: Edit, tmp_path: Path) -> None:
    fast = {"verify_packing": "off", "merge_accumulation": "auto" if rows == "merged" else "off"}
    ours = compare(place, edit, tmp_path, fast=fast, **ROWS[rows])
    report = ours.fastpack_report
    assert (EDITED in report["sync_free"].reason) == (rows != "padding_free"), report
    if rows == "padding_free":
        assert report["batches"].status == "stock", report
    if rows == "merged":
        merges = place is in_prediction_step
        changed = "changed after collation" in report["merge_accumulation"].reason
        assert (report["merge_accumulation"].status == "on") == (merges or place is in_a_loader), report
        assert changed == (place is in_a_loader), report


@pytest.mark.parametrize("edit", [replaced, in_place], ids=lambda edit: edit.__name__)
def test_an_edit_in_a_worker_survives_the_way_to_the_trainer(edit: Edit, tmp_path: Path) -> None:
    options = ROWS["merged"] | {"dataloader_num_workers": 1, "evaluates": False, "max_steps": 4}
    ours = compare(in_a_worker, edit, tmp_path, **options)
    assert EDITED in ours.fastpack_report["sync_free"].reason


class _Hooks(TrainerCallback):
    """Puts a hook on the model when the second step begins."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.register_forward_pre_hook(in_a_hook(SFTTrainer, self.edit)._edit, with_kwargs=True)


def test_a_hook_that_comes_in_a_run_ends_merging(tmp_path: Path) -> None:
    options = ROWS["merged"] | {"evaluates": False, "max_steps": 4}
    runs = [
        run(cls, tmp_path, trainer={"callbacks": [_Hooks(in_place)]}, **options) for cls in (FastSFTTrainer, SFTTrainer)
    ]
    assert_same_run(*runs)
    assert "forward pre-hook Trainer._edit on Qwen3ForCausalLM" in runs[0].fastpack_report["merge_accumulation"].reason


def test_a_wrapper_of_the_forward_may_edit_a_merged_row(tmp_path: Path) -> None:
    def wrapped(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
        class Trainer(cls):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                inner = self.model.forward

                @functools.wraps(inner)
                def forward(*args: Any, **kwargs: Any) -> Any:
                    edit(kwargs)
                    return inner(*args, **kwargs)

                self.model.forward = forward

        return Trainer

    ours = compare(wrapped, replaced, tmp_path, **ROWS["merged"])
    assert ours.fastpack_report["merge_accumulation"].status == "on"
    assert EDITED in ours.fastpack_report["sync_free"].reason


class _Doubles(TrainerCallback):
    """A hook on the outputs: the log-probabilities count twice."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def double(module: Any, args: Any, outputs: Any) -> Any:
            outputs["log_probs"] = 2 * outputs.log_probs
            return outputs

        model.register_forward_hook(double)


@pytest.mark.parametrize("rows", ROWS)
def test_a_hook_on_the_outputs_gets_those_of_stock(rows: str, tmp_path: Path) -> None:
    options = ROWS[rows] | {"evaluates": False, "max_steps": 4}
    ours, stock = (
        run(cls, tmp_path, trainer={"callbacks": [_Doubles()]}, **options) for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, stock)
    assert (
        "the model's outputs as stock for a forward hook on Qwen3ForCausalLM"
        in ours.fastpack_report["sync_free"].reason
    )


# --- the other tensors of a batch ---


def other_tokens(inputs: dict[str, Any]) -> None:
    inputs["input_ids"] = inputs["input_ids"].clamp(max=70)


def other_tokens_in_place(inputs: dict[str, Any]) -> None:
    inputs["input_ids"].clamp_(max=70)


def longer_documents(inputs: dict[str, Any]) -> None:
    """Documents are joined: every position counts from the beginning of the row."""
    inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1])[None]


def shorter_documents_in_place(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] %= 7


def shifted_documents(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = inputs["position_ids"] + 3


def cut_short(inputs: dict[str, Any]) -> None:
    total = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == total:
            inputs[name] = value[:, : total * 2 // 3]


def no_packed_batch(inputs: dict[str, Any]) -> None:
    inputs.pop("packed_batch", None)


def only_stock_keys(inputs: dict[str, Any]) -> None:
    for name in set(inputs) - {"input_ids", "labels", "position_ids"}:
        del inputs[name]


def shifted_labels(inputs: dict[str, Any]) -> None:
    labels = inputs["labels"]
    inputs["shift_labels"] = torch.cat([labels[:, 1:], labels[:, :1]], dim=1).masked_fill(labels % 5 == 0, -100)


OTHER = {
    other_tokens: "", other_tokens_in_place: "", shifted_labels: EDITED, longer_documents: "documents are read from",
    shorter_documents_in_place: "documents are read from", shifted_documents: "such rows run stock's attention",
    cut_short: "documents are read from", no_packed_batch: "a batch without packed_batch",
    only_stock_keys: "a batch without packed_batch",
}  # fmt: skip


@pytest.mark.parametrize("place", [in_compute_loss, in_a_loader], ids=lambda place: place.__name__)
@pytest.mark.parametrize("edit", OTHER, ids=lambda edit: edit.__name__)
def test_other_edits_count_as_in_stock_and_are_named(edit: Edit, place: Any, tmp_path: Path) -> None:
    ours = compare(place, edit, tmp_path, **ROWS["merged"], max_length=64)
    said = str(ours.fastpack_report.to_dict())
    assert OTHER[edit] in said
    assert OTHER[edit] or "asks the device" not in said


def test_an_edit_in_a_hook_reaches_the_attention(tmp_path: Path) -> None:
    """Past the trainer, where only the model sees it."""
    for place, edit in ((in_a_hook, shorter_documents_in_place), (in_a_hook, longer_documents)):
        ours = compare(place, edit, tmp_path, **ROWS["packed"])
        assert "documents are read from" in ours.fastpack_report["packed_attention"].reason


@pytest.mark.parametrize(
    ("name", "place", "error", "message"),
    [
        ("position_ids", in_compute_loss, ValueError, "Expected 'attention_mask' or 'position_ids'"),
        ("labels", in_a_hook, TypeError, "'NoneType' object is not subscriptable"),
    ],
)
def test_without_a_tensor_a_row_ends_as_in_stock(
    name: str, place: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    def dropped(inputs: dict[str, Any]) -> None:
        del inputs[name]

    for cls in (FastSFTTrainer, SFTTrainer):
        with pytest.raises(error, match=message):
            run(place(cls, dropped), tmp_path, **ROWS["packed"])
    if name == "position_ids":  # evaluation needs none: the row is one document
        compare(in_prediction_step, dropped, tmp_path, **ROWS["packed"])


def test_labels_of_another_length_are_named(tmp_path: Path) -> None:
    def cut_labels(inputs: dict[str, Any]) -> None:
        inputs["labels"] = inputs["labels"][:, :20]

    with pytest.raises(ValueError, match=r"labels of shape \(1, 20\) for tokens of shape .*: cut both alike"):
        run(in_compute_loss(FastSFTTrainer, cut_labels), tmp_path, **ROWS["packed"])


# --- what is not an edit ---

ROW = {"input_ids": list(range(5, 25)), "labels": [-100] * 4 + list(range(9, 25)), "seq_lengths": [12, 8]}


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS: dict[str, Callable[[Any], Any]] = {
    "as collated": lambda inputs: inputs,
    "pickle": through_pickle,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "to": lambda inputs: inputs.to("cpu"),
    "plain dict, deepcopy": lambda inputs: copy.deepcopy(dict(inputs)),
    "plain dict, pickle": lambda inputs: through_pickle(dict(inputs)),
    "as Trainer prepares": lambda inputs: type(inputs)(dict(inputs)),
    "as DDP's wrapper moves": lambda inputs: _to_kwargs((), inputs, torch.device("cpu"), False)[1][0],
    "as FSDP casts": lambda inputs: _apply_to_tensors(lambda tensor: tensor, inputs),
    "twice": lambda inputs: copy.deepcopy(through_pickle(inputs)).to("cpu"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_as_it_was_made_until_it_is_edited_whichever_way_it_came(way: str) -> None:
    inputs = WAYS[way](PackingCollator(pad_token_id=0, pad_to_multiple_of=16)([ROW]))
    batch = inputs["packed_batch"]
    inputs["input_ids"].fill_(7)  # in the same block
    inputs["seq_idx"].fill_(0)
    assert batch.counts(inputs["labels"])
    assert batch.describes(inputs["input_ids"], inputs["position_ids"])
    inputs["labels"][0, 3:5] = -100
    assert not batch.counts(inputs["labels"])
    assert batch.describes(inputs["input_ids"], inputs["position_ids"])
    inputs["position_ids"].add_(1)
    assert not batch.describes(inputs["input_ids"], inputs["position_ids"])
    later = WAYS[way](inputs)
    assert not later["packed_batch"].counts(later["labels"])
    assert not later["packed_batch"].describes(later["input_ids"], later["position_ids"])


def test_tensors_without_a_counter_are_known_by_identity() -> None:
    with torch.inference_mode():
        inputs = copy.deepcopy(PackingCollator(pad_token_id=0)([ROW]))
        assert inputs["labels"].is_inference()
        assert inputs["packed_batch"].counts(inputs["labels"])
        assert not inputs["packed_batch"].counts(inputs["labels"].clone())


def _says_nothing(trainer: Any) -> None:
    said = [line.reason for line in trainer.fastpack_report]
    assert not [reason for reason in said if "collation" in reason or "a batch without" in reason], said


@pytest.mark.parametrize("options", [
    {"dataloader_num_workers": 1, **ROWS["merged"]}, {"dataloader_num_workers": 1}, ROWS["packed"],
    {**ROWS["packed"], "trainer": {"peft_config": LoraConfig(r=2)}, "bf16": True},
], ids=["workers, merged", "workers, padding-free", "packed", "lora, bf16"])  # fmt: skip
def test_a_run_without_edits_names_none(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = run(FastSFTTrainer, tmp_path, **options)
    _says_nothing(trainer)
    assert trainer.fastpack_report["batches"].status == "on"


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("workers", [0, 2])
def test_on_cuda_an_unedited_batch_is_never_taken_for_an_edited_one(rows: str, workers: int, tmp_path: Path) -> None:
    counter = BetweenLogs(error=True)
    options = ROWS[rows] | {"dataloader_num_workers": workers, "use_cpu": False, "bf16": True, "evaluates": False}
    options |= {name: value for name, value in ONE_LOG.items() if name != "packing"}
    trainer = run(FastSFTTrainer, tmp_path, trainer={"callbacks": [counter]}, **options)
    assert counter.per_micro_batch == 0, counter.syncs
    trainer.evaluate()
    _says_nothing(trainer)


# --- rows without padding, and who may not get them ---

SEEING = [
    "compute_loss", "training_step", "prediction_step", "_prepare_inputs", "_prepare_input", "get_batch_samples",
    "_get_num_items_in_batch", "get_train_dataloader", "get_eval_dataloader", "_get_dataloader", "_inner_training_loop",
    "_run_epoch", "evaluation_loop", "floating_point_ops", "_track_num_input_tokens", "compute_loss_context_manager",
]  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_a_method_that_sees_batches_gets_one_document_per_row(name: str, tmp_path: Path) -> None:
    def same(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(FastSFTTrainer, name)(self, *args, **kwargs)

    trainer = make(type("Own", (FastSFTTrainer,), {name: same}), tmp_path)
    line = trainer.fastpack_report["batches"]
    assert (line.status, line.reason) == ("stock", f"{name} of Own may expect one document per row")


@pytest.mark.parametrize("name", ["compute_loss", "get_train_dataloader"])
def test_a_method_put_on_the_trainer_is_seen_when_training_begins(name: str, tmp_path: Path) -> None:
    shapes = []
    trainer = make(FastSFTTrainer, tmp_path)
    assert trainer.fastpack_report["batches"].path == "padding-free"
    own = getattr(trainer, name)
    setattr(trainer, name, lambda *args, **kwargs: own(*args, **kwargs))
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *args: (
        shapes.append(len(inputs["input_ids"])),
        step(model, inputs, *args),
    )[1]
    trainer.train()
    assert shapes == [4, 4]
    assert "may expect one document per row" in trainer.fastpack_report["batches"].reason


def counted(trainer: Any) -> list[float]:
    return [row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row]


@pytest.mark.parametrize("kind", ["packed", "collator", "collator set later"])
def test_tokens_are_counted_as_stock_counts_them_where_rows_are_padded(kind: str, tmp_path: Path) -> None:
    padding = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=16)
    options: dict[str, Any] = {
        "packed": {"packing": True, "pad_to_multiple_of": 16}, "collator": {"trainer": {"data_collator": padding}},
    }.get(kind, {})  # fmt: skip
    runs = []
    for cls in (FastSFTTrainer, SFTTrainer):
        trainer = make(cls, tmp_path, **options)
        if kind == "collator set later":
            trainer.data_collator = padding
        trainer.train()
        runs.append(counted(trainer))
    assert runs[0] == runs[1]


def test_a_row_cut_under_the_stock_trainer_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3")
    rows = [ROW, ROW]
    with packed_attention(model), caplog.at_level("WARNING"):
        for _ in range(2):
            inputs = PackingCollator(pad_token_id=0)(rows)
            cut_short(inputs)
            actual = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    expected = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert sum("documents are read from them" in record.getMessage() for record in caplog.records) == 1


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
        assert out.positions is not None
        out.total.backward()
        sums.append([out.total.detach(), *(p.grad for p in runner.model.parameters())])
        runner.model.zero_grad()
    for ours, whole in zip(*sums, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)
