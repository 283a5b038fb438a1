"""Edits of a batch after collation, by a subclass, a loader or a hook, count as in stock."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
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

Edit = Callable[[Any], None]
EDITED = "or edited after collation: their positions"


def replaced(inputs: Any) -> None:
    """Count two of three labels; in a row of documents also some first tokens, which then are predicted as in stock."""
    ids = inputs["input_ids"]
    labels = inputs["labels"].masked_fill(ids % 3 == 0, -100)
    inputs["labels"] = labels.where(ids % 7 != 1, ids)


def in_place(inputs: Any) -> None:
    ids = inputs["input_ids"]
    inputs["labels"][ids % 3 == 0] = -100
    inputs["labels"][ids % 7 == 1] = ids[ids % 7 == 1]


def in_method(name: str) -> Any:
    """Edit the mapping that a method of the trainer gets."""

    def place(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            edit(next(arg for arg in args if hasattr(arg, "keys")))
            return getattr(cls, name)(self, *args, **kwargs)

        return type("Trainer", (cls,), {name: method})

    place.__name__ = f"in_{name}"
    return place


in_compute_loss, in_training_step, in_prediction_step, in_prepare_inputs = map(
    in_method, ("compute_loss", "training_step", "prediction_step", "_prepare_inputs")
)


def in_get_batch_samples(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        batches, items = cls.get_batch_samples(self, *args, **kwargs)
        return [[edit(inputs), inputs][1] for inputs in batches], items

    return type("Trainer", (cls,), {"get_batch_samples": method})


class _Edited:
    """A data loader whose batches are edited as they come."""

    def __init__(self, loader: Any, edit: Edit) -> None:
        self.loader, self.edit = loader, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return ((self.edit(inputs), inputs)[1] for inputs in self.loader)


def in_a_loader(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    return type("Trainer", (cls,), {"get_train_dataloader": lambda self: _Edited(cls.get_train_dataloader(self), edit)})


def in_a_worker(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
    """Before the batch is handed over by a worker and placed."""

    def method(self: Any) -> Any:
        loader: Any = cls.get_train_dataloader(self)
        collate = loader.base_dataloader.collate_fn
        loader.base_dataloader.collate_fn = lambda rows: [inputs := collate(rows), edit(inputs)][0]
        return loader

    return type("Trainer", (cls,), {"get_train_dataloader": method})


def with_model(change: Callable[[Any, Edit], None]) -> Any:
    """Change the model of a trainer as it is made."""

    @functools.wraps(change)
    def place(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            cls.__init__(self, *args, **kwargs)
            change(self.model, edit)

        return type("Trainer", (cls,), {"__init__": init})

    return place


def _hook(edit: Edit, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("labels") is not None:
        edit(kwargs)
    return args, kwargs


@with_model
def in_a_hook(model: Any, edit: Edit) -> None:
    model.register_forward_pre_hook(functools.partial(_hook, edit), with_kwargs=True)


@with_model
def in_a_forward(model: Any, edit: Edit) -> None:
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        edit(kwargs)
        return inner(*args, **kwargs)

    model.forward = forward


PLACES = [
    in_compute_loss, in_training_step, in_prediction_step, in_prepare_inputs, in_get_batch_samples, in_a_loader,
    in_a_hook,
]  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "per_device_train_batch_size": 2},
    "padding_free": {},
    "merged": {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
}
by_name = functools.partial(pytest.mark.parametrize, ids=lambda value: getattr(value, "__name__", value))


def make(
    cls: type[SFTTrainer], folder: Path, *, trainer: dict[str, Any] | None = None, fast: dict[str, Any] | None = None,
    rows: int = 16, **options: Any,
) -> Any:  # fmt: skip
    fast = fast if issubclass(cls, FastSFTTrainer) else None
    trainer = {"eval_dataset": make_dataset("tokens", 6, seed=7)} | (trainer or {})
    options = {"max_steps": 2, "eval_strategy": "no", "data": make_dataset("tokens", rows)} | options
    return build(cls, folder, fast=fast, trainer=trainer, **options)


def run(cls: type[SFTTrainer], folder: Path, *, evaluates: bool = True, **options: Any) -> Any:
    strategy = {"eval_strategy": "steps", "eval_steps": 2} if evaluates else {"eval_strategy": "no"}
    given = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.2, "fast": {"verify_packing": "off"}}
    torch.manual_seed(0)
    runner = make(cls, folder, rows=40, **(given | strategy | options))
    runner.train()
    return runner


def compare(place: Any, edit: Edit, folder: Path, **options: Any) -> Any:
    ours, stock = (run(place(cls, edit), folder, **options) for cls in (FastSFTTrainer, SFTTrainer))
    assert_same_log(ours, stock, rtol=2e-5, atol=5e-6)
    expected = stock.model.state_dict()
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
    return ours


@by_name(
    ("rows", "edit", "place"),
    [
        *(
            (rows, edit, place)
            for place in PLACES
            for rows, edit in (("packed", replaced), ("padding_free", replaced), ("merged", in_place))
        ),
        ("merged", replaced, in_a_forward),
    ],
)
def test_labels_edited_on_their_way_count_as_in_stock(rows: str, place: Any, edit: Edit, tmp_path: Path) -> None:
    fast = {"verify_packing": "off", "merge_accumulation": "auto" if rows == "merged" else "off"}
    ours = compare(place, edit, tmp_path, fast=fast, **ROWS[rows])
    report = ours.fastpack_report
    assert (EDITED in report["sync_free"].reason) == (rows != "padding_free"), report
    if rows == "padding_free":
        assert report["batches"].status == "stock", report
    if rows == "merged":
        changed = "changed after collation" in report["merge_accumulation"].reason
        merges = place in (in_prediction_step, in_a_forward, in_a_loader)
        assert (report["merge_accumulation"].status == "on") == merges, report
        assert changed == (place is in_a_loader), report


@by_name("edit", [replaced, in_place])
def test_an_edit_in_a_worker_survives_the_way_to_the_trainer(edit: Edit, tmp_path: Path) -> None:
    options = ROWS["merged"] | {"dataloader_num_workers": 1, "evaluates": False, "max_steps": 4}
    ours = compare(in_a_worker, edit, tmp_path, **options)
    assert EDITED in ours.fastpack_report["sync_free"].reason


class _ChangesModel(TrainerCallback):
    """Calls a function with the model when a step begins."""

    def __init__(self, step: int, change: Callable[[Any], object]) -> None:
        self.step, self.change = step, change

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.change(model)


def _doubles(module: Any, args: Any, outputs: Any) -> Any:
    outputs["log_probs"] = 2 * outputs.log_probs
    return outputs


def _add_edits(model: Any) -> None:
    model.register_forward_pre_hook(functools.partial(_hook, in_place), with_kwargs=True)


@pytest.mark.parametrize(
    ("rows", "step", "change", "feature", "reason"),
    [
        ("merged", 1, _add_edits, "merge_accumulation", "forward pre-hook"),
        *(
            (
                rows,
                0,
                lambda model: model.register_forward_hook(_doubles),
                "sync_free",
                "the model's outputs as stock for a forward hook on Qwen3ForCausalLM",
            )
            for rows in ROWS
        ),
    ],
    ids=["edits", *ROWS],
)
def test_a_hook_that_comes_in_a_run_counts_as_in_stock(
    rows: str, step: int, change: Any, feature: str, reason: str, tmp_path: Path
) -> None:
    options = ROWS[rows] | {"evaluates": False, "max_steps": 4, "trainer": {"callbacks": [_ChangesModel(step, change)]}}
    ours = compare(lambda cls, _: cls, in_place, tmp_path, **options)
    assert reason in ours.fastpack_report[feature].reason


# --- the other tensors of a batch ---


def other_tokens(inputs: Any) -> None:
    inputs["input_ids"] = inputs["input_ids"].clamp(max=70)


def other_tokens_in_place(inputs: Any) -> None:
    inputs["input_ids"].clamp_(max=70)


def longer_documents(inputs: Any) -> None:
    """Documents are joined: every position counts from the beginning of the row."""
    inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1])[None]


def shorter_documents_in_place(inputs: Any) -> None:
    inputs["position_ids"] %= 7


def shifted_documents(inputs: Any) -> None:
    inputs["position_ids"] = inputs["position_ids"] + 3


def copied_positions(inputs: Any) -> None:
    inputs["position_ids"] = inputs["position_ids"].clone()


def cut_short(inputs: Any) -> None:
    total = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == total:
            inputs[name] = value[:, : total * 2 // 3]


def no_packed_batch(inputs: Any) -> None:
    inputs.pop("packed_batch", None)


def only_stock_keys(inputs: Any) -> None:
    for name in set(inputs) - {"input_ids", "labels", "position_ids"}:
        del inputs[name]


def shifted_labels(inputs: Any) -> None:
    labels = inputs["labels"]
    inputs["shift_labels"] = torch.cat([labels[:, 1:], labels[:, :1]], dim=1).masked_fill(labels % 5 == 0, -100)


READ, OURS = "documents are read from", "such rows run the attention of the model"
OTHER = {
    other_tokens: "", other_tokens_in_place: "", copied_positions: "", shifted_labels: EDITED, longer_documents: READ,
    shorter_documents_in_place: READ, shifted_documents: OURS, no_packed_batch: "a batch without packed_batch",
    only_stock_keys: "a batch without packed_batch",
}  # fmt: skip


@by_name(
    ("edit", "place"),
    [
        *((edit, place) for edit in OTHER for place in (in_compute_loss, in_a_loader)),
        (shorter_documents_in_place, in_a_hook),
        (longer_documents, in_a_hook),
    ],
)
def test_other_edits_count_as_in_stock_and_are_named(edit: Edit, place: Any, tmp_path: Path) -> None:
    ours = compare(place, edit, tmp_path, **ROWS["merged"], max_length=64)
    said = str(ours.fastpack_report.to_dict())
    assert OTHER[edit] in said
    assert OTHER[edit] or "synchronizes" not in said


def without(name: str) -> Edit:
    return lambda inputs: inputs.pop(name)


def cut_labels(inputs: Any) -> None:
    inputs["labels"] = inputs["labels"][:, :20]


BOTH, SHARED = (FastSFTTrainer, SFTTrainer), {"data": prefixed(), "fast": {"share_prefixes": "on"}}


@pytest.mark.parametrize(
    ("edit", "place", "classes", "options", "error", "message"),
    [
        (without("position_ids"), in_compute_loss, BOTH, {}, ValueError, "'attention_mask' or 'position_ids'"),
        (without("labels"), in_a_hook, BOTH, {}, TypeError, "'NoneType' object is not subscriptable"),
        (cut_labels, in_compute_loss, BOTH[:1], {}, ValueError, r"labels of shape \(1, 20\) for .*: cut both alike"),
        (cut_short, in_compute_loss, BOTH[:1], {}, ValueError, r"of \d+ tokens for a row of \d+ .*give one row, uncut"),
        (cut_short, in_a_loader, BOTH[:1], {}, ValueError, r"of \d+ tokens for a row of \d+ .*give one row, uncut"),
        (shifted_documents, in_a_loader, BOTH[:1], SHARED, ValueError, "set share_prefixes='off'"),
        (shorter_documents_in_place, in_a_loader, BOTH[:1], SHARED, ValueError, "set share_prefixes='off'"),
    ],
)
def test_what_cannot_run_is_an_error(
    edit: Edit, place: Any, classes: Any, options: Any, error: Any, message: str, tmp_path: Path
) -> None:
    for cls in classes:
        with pytest.raises(error, match=message):
            run(place(cls, edit), tmp_path, **ROWS["packed"] | options)


def test_evaluation_without_position_ids_has_one_document(tmp_path: Path) -> None:
    compare(in_prediction_step, without("position_ids"), tmp_path, **ROWS["packed"])


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
    def known(inputs: Any) -> tuple[bool, bool]:
        batch = inputs["packed_batch"]
        return batch.counts(inputs["labels"]), batch.describes(inputs["input_ids"], inputs["position_ids"])

    inputs = WAYS[way](PackingCollator(pad_token_id=0, pad_to_multiple_of=16)([ROW]))
    inputs["input_ids"].fill_(7)  # in the same block
    inputs["seq_idx"].fill_(0)
    assert known(inputs) == (True, True)
    inputs["labels"][0, 3:5] = -100
    assert known(inputs) == (False, True)
    inputs["position_ids"].add_(1)
    assert known(inputs) == known(WAYS[way](inputs)) == (False, False)


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


def test_edited_positions_are_named_once_under_the_stock_trainer(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3")
    with packed_attention(model), caplog.at_level("WARNING"):
        for _ in range(2):
            inputs = PackingCollator(pad_token_id=0)([ROW, ROW])
            longer_documents(inputs)
            actual = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    expected = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert sum(READ in record.getMessage() for record in caplog.records) == 1


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

    line = make(type("Own", (FastSFTTrainer,), {name: same}), tmp_path).fastpack_report["batches"]
    assert (line.status, line.reason) == ("stock", f"{name} of Own may expect one document per row")


@pytest.mark.parametrize("name", ["compute_loss", "get_train_dataloader"])
def test_a_method_put_on_the_trainer_is_seen_when_training_begins(name: str, tmp_path: Path) -> None:
    shapes = []
    trainer = make(FastSFTTrainer, tmp_path)
    assert trainer.fastpack_report["batches"].path == "padding-free"
    own, step = getattr(trainer, name), trainer.training_step
    setattr(trainer, name, lambda *args, **kwargs: own(*args, **kwargs))
    trainer.training_step = lambda model, inputs, *args: (
        shapes.append(len(inputs["input_ids"])),
        step(model, inputs, *args),
    )[1]
    trainer.train()
    assert shapes == [4, 4]
    assert "may expect one document per row" in trainer.fastpack_report["batches"].reason


@pytest.mark.parametrize("kind", ["packed", "collator", "collator set later"])
def test_tokens_are_counted_as_stock_counts_them_where_rows_are_padded(kind: str, tmp_path: Path) -> None:
    padding = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=16)
    options: dict[str, Any] = {
        "packed": {"packing": True, "pad_to_multiple_of": 16}, "collator": {"trainer": {"data_collator": padding}},
    }.get(kind, {})  # fmt: skip
    counted = []
    for cls in BOTH:
        trainer = make(cls, tmp_path, **options)
        if kind == "collator set later":
            trainer.data_collator = padding
        trainer.train()
        counted.append([row["num_tokens"] for row in trainer.state.log_history if "num_tokens" in row])
    assert counted[0] == counted[1]


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
