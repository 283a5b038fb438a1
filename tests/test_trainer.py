"""`FastSFTTrainer` vs. `trl.SFTTrainer`: same loss, same log, same files; the report names what runs."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, List, Value
from peft import LoraConfig
from torch.testing import assert_close
from trainer_material import (
    assert_line,
    assert_same_log,
    both,
    build,
    callback,
    figures,
    make_dataset,
    make_tokenizer,
    train,
)
from transformers import DataCollatorForSeq2Seq
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import install as seam
from fastpack_trl.attention.per_document import PerDocument
from fastpack_trl.errors import PackingError
from fastpack_trl.features import packed_attention as attention_feature
from fastpack_trl.model.upstream import NEEDS
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.dataset import counted_tokens
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import tiny_model

Options = dict[str, Any]

LENGTHS = Dataset.from_dict({"input_ids": [list(range(3, 43))] * 16, "seq_lengths": [[20, 20]] * 16})
"""Without packing, TRL takes an example as one document, whatever a column `seq_lengths` says."""
ONE_BY_ONE: Options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
WHOLE: Options = {"max_steps": -1, "num_train_epochs": 1}
PREPARED: Options = {"dataset_kwargs": {"skip_prepare_dataset": True}}
DENSE: Options = {"gradient_checkpointing": False}
LORA: Options = {"trainer": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}}
COMPILED: Options = {"torch_compile": True, "torch_compile_backend": "eager", "eval_strategy": "no"}
COMPILED |= {"per_device_train_batch_size": 1, "pad_to_multiple_of": 48} | DENSE


def rows(count: int, masked: tuple[int, ...] = ()) -> Dataset:
    """Tokenized examples, ten of one token first; those of `masked` have no label that counts."""
    ids = [[5 + (7 * index + place) % 80 for place in range(1 + max(0, index - 9) % 14)] for index in range(count)]
    labels = [[-100] * len(row) if index in masked else row for index, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


UNPACKED: list[Options] = [
    {},
    {"data": "conversational", "assistant_only_loss": True},
    {"data": "prompt_completion", "label_smoothing_factor": 0.1},
    {"trainer": {"formatting_func": lambda row: f"w1 {row['text']} w2"}, "max_length": 16},
    {"data": LENGTHS, "eval_strategy": "no"},
    {"data": LENGTHS.to_iterable_dataset(), "eval_strategy": "no"},
    ONE_BY_ONE,
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ONE_BY_ONE | {"data": "prompt_completion", "completion_only_loss": True},
    ONE_BY_ONE | {"data": "conversational"} | DENSE,
    ONE_BY_ONE | LORA,
    ONE_BY_ONE | WHOLE | {"data": make_dataset("text", 22), "eval_steps": 3},  # the last step has two of four batches
    ONE_BY_ONE | {"max_length": 5},
    ONE_BY_ONE | WHOLE | {"per_device_train_batch_size": 3, "dataloader_drop_last": True},
    ONE_BY_ONE | {"train_sampling_strategy": "group_by_length"},
    ONE_BY_ONE | {"family": "gpt_oss"},
    ONE_BY_ONE | {"family": "qwen3_moe"},
    ONE_BY_ONE | PREPARED | {"data": rows(34, masked=(10, 11, 12, 13, 19))},
    PREPARED | {"data": rows(16), "eval_strategy": "no", "max_steps": 5, "logging_nan_inf_filter": False},
]
PACKED: list[Options] = [
    {"data": "prompt_completion", "completion_only_loss": False},
    {"data": "tokens", "packing_strategy": "bfd_split", "max_length": 16},
    {"eval_packing": False, "max_length": 16},
    {"neftune_noise_alpha": 5.0, "include_num_input_tokens_seen": "all"},
    {"packing": False, "padding_free": True, "max_length": None},
    {"loss_type": "dft", "train_sampling_strategy": "sequential"} | DENSE,
    {"gradient_checkpointing_kwargs": {"selective": True}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"family": "qwen3_moe"},
    {"bf16": True},
    {"data": make_dataset("text").to_iterable_dataset(), "eval_strategy": "no"},
]


def _model_state(model: Any) -> Options:
    return {
        "implementation": model.config._attn_implementation,
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "own": [
            (name, [own for own in vars(module) if own == "forward" or own.startswith("_fastpack")])
            for name, module in model.named_modules()
        ],
    }


@pytest.mark.parametrize(
    ("path", "options"),
    [
        *(("padding-free", options) for options in UNPACKED),
        *(("packed", {"packing": True} | options) for options in PACKED),
        ("stock", {"packing": True, "packing_strategy": "wrapped"}),
        pytest.param("stock", {"packing": True} | COMPILED, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_log_and_model_are_those_of_stock(path: str, options: Options, tmp_path: Path) -> None:
    ours, stock = both(tmp_path, **options)
    rtol, atol = (2**-7, 2**-7) if "bf16" in options else (3e-5, 5e-6) if path == "padding-free" else (1e-5, 2e-6)
    assert_same_log(ours, stock, rtol, atol)
    assert _model_state(ours.model) == _model_state(stock.model)
    report = ours.fastpack_report
    assert report["batches"].path == path
    assert report["batches"].reason
    if path == "padding-free" and "label_smoothing_factor" not in options:
        assert report["sync_free"].path == "loss, metrics, host work"
        merged = options.get("gradient_accumulation_steps", 1) > 1
        assert report["merge_accumulation"].status == ("on" if merged else "off")
    if not isinstance(ours.train_dataset, Dataset):
        assert "unknown" in report.facts["truncated tokens"]
    if "torch_compile" in options:
        line = report["fused_layers"]
        assert (line.status, "torch_compile=True" in line.reason) == ("off", True), line


@pytest.mark.parametrize("options", [ONE_BY_ONE, {"per_device_train_batch_size": 2}, ONE_BY_ONE | {"packing": True}],
                         ids=["accumulated", "two documents", "packed"])  # fmt: skip
def test_an_adapter_that_is_invoked_once_per_row_has_the_rows_of_stock(tmp_path: Path, options: Options) -> None:
    adapter: Options = {"r": 4, "init_lora_weights": False, "alora_invocation_tokens": [10], "task_type": "CAUSAL_LM"}
    config = LoraConfig(target_modules=["q_proj", "v_proj"], **adapter)
    # PEFT refuses an evaluation between two steps under checkpointing.
    ours, stock = both(tmp_path, **options, eval_strategy="no", trainer={"peft_config": config})
    assert_same_log(ours, stock)
    assert "aLoRA" in ours.fastpack_report["merge_accumulation" if "packing" in options else "batches"].reason


@pytest.mark.parametrize(
    ("family", "field", "reason"),
    [("qwen3", "layerdrop", "layerdrop"), ("mixtral", "router_jitter_noise", "jitter_noise 0.1 draws other")],
)
def test_other_random_draws_of_a_merged_row_are_named(family: str, field: str, reason: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    setattr(model.config, field, 0.1)
    ours = train(FastSFTTrainer, tmp_path, model=model, **ONE_BY_ONE, max_steps=1, eval_strategy="no")
    assert_line(ours, "merge_accumulation", reason, status="off" if reason == field else "on")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"neftune_noise_alpha": 5.0}, "NEFTune's noise"),
        ({"include_num_input_tokens_seen": "all"}, "counts the tokens of rows"),
        ({"pad_to_multiple_of": 8}, "asks for padded shapes"),
        ({"trainer": {"data_collator": DataCollatorForSeq2Seq(make_tokenizer())}}, "custom data collator"),
    ],
)
def test_batches_stay_stock_where_their_padding_counts(options: Options, reason: str, tmp_path: Path) -> None:
    assert_line(build(FastSFTTrainer, tmp_path, data="tokens", **options), "batches", reason, path="stock")


def test_weights_files_and_checkpoints_are_those_of_stock(tmp_path: Path) -> None:
    saving: Options = {"packing": True, "save_strategy": "steps", "save_steps": 2}
    ours, stock = both(tmp_path, **saving)
    files = {}
    for trainer, name in ((ours, "ours"), (stock, "stock")):
        trainer.save_model(str(tmp_path / name / "final"))
        files[name] = sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
    assert files["ours"] == sorted([*files["stock"], "fastpack_report.json"])
    assert_close(ours.model.state_dict(), stock.model.state_dict(), rtol=1e-4, atol=1e-5)
    expected = [row["loss"] for row in figures(stock) if "loss" in row][-1]
    for cls, folder in ((FastSFTTrainer, "stock"), (SFTTrainer, "ours")):  # each resumes the other's
        resumed = train(cls, tmp_path / folder, resume="checkpoint-2", model=tiny_model("qwen3", seed=5), packing=True)
        assert [row["loss"] for row in figures(resumed) if "loss" in row][-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "bloom", "falcon"])
def test_documents_are_padded_one_by_one_where_no_attention_keeps_them_apart(family: str, tmp_path: Path) -> None:
    options: Options = {"family": family, "packing": True, "gradient_accumulation_steps": 2}
    options |= {"include_num_input_tokens_seen": "all"}
    ours = train(FastSFTTrainer, tmp_path / "ours", **options)
    report = ours.fastpack_report
    assert (report["packed_attention"].status, report["batches"].path) == ("stock", "documents")
    assert report.facts["padded tokens per token"].startswith("at least ")
    if family in ("stablelm", "nemotron"):  # TRL's own rows are right
        stock = train(SFTTrainer, tmp_path / "stock", **options)
        assert_same_log(ours, stock)
        assert ours.state.num_input_tokens_seen == stock.state.num_input_tokens_seen > 0


def test_predictions_of_padded_documents_have_every_token_of_the_rows(tmp_path: Path) -> None:
    def count(prediction: Any) -> dict[str, int]:
        return {"tokens": int((prediction.label_ids != -100).sum())}

    tokens = []
    for family in ("qwen3", "bloom"):  # one row, and its documents
        options: Options = {"family": family, "packing": True, "per_device_eval_batch_size": 2}
        trainer = build(FastSFTTrainer, tmp_path, trainer={"compute_metrics": count}, **options)
        assert len(trainer.eval_dataset) % 2
        predicted = trainer.predict(trainer.eval_dataset)
        tokens.append((trainer.evaluate()["eval_tokens"], count(predicted)["tokens"]))
        assert predicted.predictions.shape[:2] == predicted.label_ids.shape
    assert tokens[0] == tokens[1]


def test_model_is_restored_after_an_exception(tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise RuntimeError("stopped in a callback")

    states = []
    for cls in (FastSFTTrainer, SFTTrainer):
        model, stops = tiny_model("qwen3"), {"callbacks": [callback("on_step_end", stop)()]}
        with pytest.raises(RuntimeError, match="stopped in a callback"):
            train(cls, tmp_path, model=model, packing=True, trainer=stops)
        states.append(_model_state(model))
    assert states[0] == states[1]


def test_masks_are_gone_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, derive = dict[int, PackedBatch](), PackedBatch.derive

    def record(self: PackedBatch, key: Any, build: Any) -> Any:
        batches[id(self)] = self
        return derive(self, key, build)

    monkeypatch.setattr(PackedBatch, "derive", record)
    check = callback("on_step_end", lambda *_: alive.append([one for one in batches.values() if one.derived.values]))
    alive: list[Any] = []
    options: Options = {"family": "gemma3_text", "packing": True, "gradient_accumulation_steps": 3}
    fast = {"verify_packing": "off", "merge_accumulation": "off"}
    train(FastSFTTrainer, tmp_path, fast=fast, eval_strategy="no", trainer={"callbacks": [check()]}, **options)
    assert alive == [[]] * 4
    assert len(batches) > 3


def test_kept_loader_workers_do_not_outlive_what_decides_their_batches(tmp_path: Path) -> None:
    given = {"dataloader_persistent_workers": True, "dataloader_num_workers": 1, "eval_strategy": "no", "max_steps": 1}
    shapes = []
    for cls in (FastSFTTrainer, SFTTrainer):
        trainer = build(cls, tmp_path, **given)
        trainer.evaluate()
        trainer.compute_metrics = lambda prediction: shapes.append(prediction.predictions.shape) or {}
        trainer.evaluate()
    assert shapes[0] == shapes[1]


def test_compute_metrics_and_predict_get_the_padded_batches_of_stock(tmp_path: Path) -> None:
    runs, shapes = [], []
    for cls in (FastSFTTrainer, SFTTrainer):
        seen: list[Any] = []

        def metrics(prediction: Any, seen: list[Any] = seen) -> dict[str, float]:
            seen.append(prediction.predictions.shape)
            return {"sum": float(np.abs(prediction.predictions).sum())}

        runs.append(train(cls, tmp_path / cls.__name__, trainer={"compute_metrics": metrics}))
        shapes.append([runs[-1].predict(runs[-1].eval_dataset).predictions.shape, *seen])
        runs[-1].compute_metrics = None
        shapes[-1].append(runs[-1].predict(runs[-1].eval_dataset).predictions.shape)
    assert_same_log(*runs, rtol=1e-4)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("why", "feature", "reason"),
    [
        ("disabled", "fastpack", "FASTPACK_DISABLE"),
        ("off", "packed_attention", "switched off"),
        ("moved", "fastpack", "the installed trl has no trl.SFTTrainer._renamed_upstream"),
    ],
)
def test_where_ours_does_not_run_the_figures_are_those_of_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, feature: str, reason: str
) -> None:
    entered: list[Any] = []
    if why == "disabled":
        monkeypatch.setenv("FASTPACK_DISABLE", "1")
        monkeypatch.setattr(attention_feature, "read_features", entered.append)
    elif why == "moved":
        monkeypatch.setitem(NEEDS, "batches", (*NEEDS["batches"], "trl.SFTTrainer._renamed_upstream"))
    ours, stock = both(tmp_path, packing=True, fast={"packed_attention": "off"} if why == "off" else None)
    assert figures(ours) == figures(stock)
    assert not entered
    assert reason in ours.fastpack_report[feature].reason


def test_collator_and_context_manager_serve_the_stock_trainer(tmp_path: Path) -> None:
    packed = build(SFTTrainer, tmp_path, packing=True)
    packed.data_collator = PackingCollator(pad_token_id=0)
    with seam.packed_attention(packed.model) as attention:
        packed.train()
    assert attention.path == "per_document"
    assert_same_log(packed, train(SFTTrainer, tmp_path, packing=True))


def test_signature_and_help_of_the_constructor_are_those_of_stock() -> None:
    assert inspect.signature(FastSFTTrainer) == inspect.signature(SFTTrainer)
    assert FastSFTTrainer.__init__.__doc__ == SFTTrainer.__init__.__doc__


@pytest.mark.parametrize("packing", [True, False])
def test_any_data_set_is_evaluated_before_in_the_middle_of_and_after_training(packing: bool, tmp_path: Path) -> None:
    logs = []
    for cls in (FastSFTTrainer, SFTTrainer):
        trainer = build(cls, tmp_path, packing=packing)
        inside = partial(trainer.evaluate, make_dataset("text", 6, seed=3))
        trainer.add_callback(callback("on_step_end", lambda *_, inside=inside: inside())())
        trainer.evaluate({"train": make_dataset("text", 6, seed=4)})
        trainer.train()
        trainer.evaluate(make_dataset("text", 6, seed=5))
        logs.append(trainer)
    assert_same_log(*logs)


def test_report_names_fill_truncation_and_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = train(FastSFTTrainer, tmp_path, packing=True, max_length=16)
    report = ours.fastpack_report
    assert report.banner() in capsys.readouterr().out
    lengths = [len(row) for row in make_dataset("tokens")["input_ids"]]
    lost = sum(max(0, length + 1 - 16) for length in lengths)  # TRL appends the end token to plain text
    said = report.facts["truncated tokens"]
    assert f"{lost:,} tokens" in said
    assert "packing_strategy='bfd_split'" in said
    assert report.facts["packing fill"].endswith("16 tokens")
    assert ours.fastpack_proof is not None
    said = make_trainer(tmp_path, make_dataset("tokens"), packing=False, max_length=16).fastpack_report.facts
    assert "cut by max_length=16; max_length=" in said["truncated tokens"]
    assert "packing_strategy" not in said["truncated tokens"]


def test_failed_check_pads_documents_and_stops_explicit_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = PerDocument.prepare

    def leaking(self: Any, batch: PackedBatch, *where: Any) -> Any:
        return prepare(self, PackedBatch.from_lengths((batch.total_tokens,)), *where)

    monkeypatch.setattr(PerDocument, "prepare", leaking)
    for module in (attention_feature, seam):  # it passes its trial, and leaks in the model
        monkeypatch.setattr(module, "failure", lambda *_: "")
    ours, stock = both(tmp_path, packing=True)
    assert "failed its packing check" in ours.fastpack_report["packed_attention"].reason
    assert ours.fastpack_run.plan.kind == "documents", "an evaluation after training must not take the path that failed"
    assert_same_log(ours, stock)
    with pytest.raises(PackingError, match=r"LEAK.*set packing=False"):
        train(FastSFTTrainer, tmp_path, packing=True, fast={"packed_attention": "per_document"})


def make_trainer(folder: Path, dataset: Dataset, **more: Any) -> FastSFTTrainer:
    given = {"train_dataset": dataset, "eval_dataset": None}
    return build(FastSFTTrainer, folder, data="tokens", trainer=given, eval_strategy="no", **{"packing": True} | more)


def test_data_without_tokens_or_loss_is_named_and_data_of_stock_is_left_to_it(tmp_path: Path) -> None:
    fixed = Dataset.from_dict(
        {"input_ids": [[5, 6, 7, 8]] * 8}, features=Features({"input_ids": List(Value("int64"), length=4)})
    )
    make_trainer(tmp_path, fixed, packing=False, max_steps=1).train()
    first_label = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "labels": [[-1, 6, 7]] * 4})
    make_trainer(tmp_path, first_label, max_steps=1).train()
    with pytest.raises(ValueError, match="No columns in the dataset match"):
        make_trainer(tmp_path, make_dataset("tokens")).predict(make_dataset("text"))
    single = make_trainer(tmp_path, Dataset.from_dict({"input_ids": [[5], [6], [7], [8]]}))
    assert single.fastpack_report.facts["loss tokens"].startswith("none")
    counted = make_trainer(tmp_path, make_dataset("tokens"))
    assert "loss tokens" not in counted.fastpack_report.facts
    assert counted_tokens(counted.train_dataset) == sum(len(row) - 1 for row in make_dataset("tokens")["input_ids"])
    empty = make_trainer(tmp_path, Dataset.from_dict({"input_ids": [[5, 6, 7], [], [8, 9], [], [10]]}), max_steps=1)
    assert empty.fastpack_report.facts["skipped empty documents"] == 2
    empty.train()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_ids": [[]]}, "no token: all 1 documents are empty"),
        ({"input_ids": [[1, 2, 96]]}, "96 in 'input_ids', outside the model's vocabulary of 96"),
        ({"input_ids": [[1, -2, 5]]}, "-2 in 'input_ids'"),
        ({"input_ids": [[1, 2, 5]], "labels": [[1, 2, 500]]}, "500 in 'labels'"),
        ({"body": ["w1 w2"]}, "the train data set has the columns body: sft needs messages, or"),
    ],
)
def test_bad_data_is_named_before_the_first_step(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.config.vocab_size = 50  # the embedding has more rows
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, Dataset.from_dict(data), model=model).train()
