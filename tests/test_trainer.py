"""`FastSFTTrainer` beside `trl.SFTTrainer`: same loss, same log, same files; what runs is named."""

from __future__ import annotations

import gc
import inspect
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from trainer_material import assert_same_log, both, build, figures, make_dataset, make_tokenizer, train
from transformers import BertConfig, BertModel, DataCollatorForSeq2Seq, TrainerCallback
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import feature
from fastpack_trl.attention import install as seam
from fastpack_trl.errors import PackingError
from fastpack_trl.model.upstream import NEEDS
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.dataset import counted_tokens
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import tiny_model

LENGTHS = Dataset.from_dict({"input_ids": [list(range(3, 43))] * 8, "seq_lengths": [[20, 20]] * 8})
"""Without packing, stock takes a row as one document, whatever a column `seq_lengths` says."""


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, "padding-free"),
        ({"data": "conversational", "assistant_only_loss": True}, "padding-free"),
        ({"data": "prompt_completion", "label_smoothing_factor": 0.1}, "padding-free"),
        ({"gradient_accumulation_steps": 3, "dataloader_num_workers": 1}, "padding-free"),
        ({"data": "prompt_completion", "completion_only_loss": False, "packing": True}, "packed"),
        ({"data": "tokens", "packing": True, "packing_strategy": "bfd_split", "max_length": 16}, "packed"),
        ({"packing": True, "eval_packing": False, "max_length": 16}, "packed"),
        ({"packing": True, "pad_to_multiple_of": 8, "gradient_checkpointing": False}, "packed"),
        ({"packing": True, "neftune_noise_alpha": 5.0, "include_num_input_tokens_seen": "all"}, "packed"),
        ({"padding_free": True, "max_length": None}, "packed"),
        ({"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}, "packed"),
        (
            {"packing": True, "loss_type": "dft", "gradient_checkpointing": False,
             "train_sampling_strategy": "sequential"},
            "packed",
        ),
        ({"packing": True, "gradient_checkpointing_kwargs": {"selective": True}}, "packed"),
        ({"packing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "packed"),
        ({"family": "qwen3_moe", "packing": True}, "packed"),
        ({"family": "mistral", "packing": True}, "packed"),
        ({"packing": True, "packing_strategy": "wrapped"}, "stock"),
        ({"packing": True, "bf16": True}, "packed"),
        ({"trainer": {"formatting_func": lambda row: f"w1 {row['text']} w2"}, "max_length": 16}, "padding-free"),
        ({"data": LENGTHS, "eval_strategy": "no"}, "padding-free"),
        pytest.param(
            {"packing": True, "torch_compile": True, "torch_compile_backend": "eager", "eval_strategy": "no",
             "gradient_checkpointing": False, "per_device_train_batch_size": 1, "pad_to_multiple_of": 48},
            "stock", marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)  # fmt: skip
def test_log_is_that_of_stock(tmp_path: Path, options: dict[str, Any], batches: str) -> None:
    ours, stock = both(tmp_path, **options)
    assert_same_log(ours, stock, **dict.fromkeys(("rtol", "atol"), 2**-7) if "bf16" in options else {})
    assert ours.fastpack_report["batches"].path == batches
    assert ours.fastpack_report["batches"].reason
    if "torch_compile" in options:
        line = ours.fastpack_report["layer_compile"]
        assert (line.status, "torch_compile=True" in line.reason) == ("off", True), line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"neftune_noise_alpha": 5.0}, "NEFTune's noise"),
        ({"include_num_input_tokens_seen": "all"}, "counts the tokens of rows"),
        ({"pad_to_multiple_of": 8}, "asks for padded shapes"),
    ],
    ids=str,
)
def test_padded_batches_of_stock_stay_where_they_are_counted(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    line = make_trainer(tmp_path, make_dataset("tokens"), **options).fastpack_report["batches"]
    assert line.path == "stock"
    assert reason in line.reason


def test_trained_weights_and_saved_files_are_those_of_stock(tmp_path: Path) -> None:
    ours, stock = both(tmp_path, packing=True, save_strategy="steps", save_steps=2)
    for trainer, name in ((ours, "ours"), (stock, "stock")):
        trainer.save_model(str(tmp_path / name / "final"))
    files = {
        name: sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
        for name in ("ours", "stock")
    }
    assert files["ours"] == sorted([*files["stock"], "fastpack_report.json"])
    for name, weight in ours.model.state_dict().items():
        torch.testing.assert_close(weight, stock.model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_resumes_a_checkpoint_of_stock_and_stock_resumes_ours(tmp_path: Path) -> None:
    _, stock = both(tmp_path, packing=True, save_strategy="steps", save_steps=2)

    for cls, folder in ((FastSFTTrainer, "stock"), (SFTTrainer, "ours")):
        model = tiny_model("qwen3", seed=5)
        resumed = train(cls, tmp_path / folder, resume="checkpoint-2", model=model, packing=True)
        last = [row for row in figures(resumed) if "loss" in row][-1]
        expected = [row for row in figures(stock) if "loss" in row][-1]
        assert last["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("fast", [None, {"lora": "off"}], ids=str)
def test_nf4_qlora_through_the_name_of_a_model(fast: dict[str, Any] | None, tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    pytest.importorskip("bitsandbytes")
    tiny_model("qwen3", hidden_size=64, head_dim=16, intermediate_size=64).save_pretrained(tmp_path / "model")
    trainer = {
        "peft_config": LoraConfig(r=2, target_modules="all-linear"),
        "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    }
    options: dict[str, Any] = {"packing": True, "trainer": trainer, "model": str(tmp_path / "model")}
    options["model_init_kwargs"] = {"dtype": "float32"}
    # On the CPU an evaluation of bitsandbytes' 4-bit layers breaks the gradients of the steps after it, also in stock.
    ours, stock = both(tmp_path, eval_strategy="no", fast=fast, **options)
    assert_same_log(ours, stock, rtol=2**-7, atol=2**-7)  # TRL holds the adapters in bf16
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert ours.fastpack_report["sync_free"].path == "loss, metrics, host work"


def test_gpt_oss_packs_without_the_leak_of_stock(tmp_path: Path) -> None:
    """One document per row is what packing must compute: stock's packed loss is another one."""
    packed, leaking = both(tmp_path, family="gpt_oss", packing=True, max_steps=1, eval_strategy="no")
    assert abs(figures(packed)[0]["loss"] - figures(leaking)[0]["loss"]) > 1e-3
    assert packed.fastpack_proof is not None
    assert packed.fastpack_proof.proven


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "bloom", "falcon"])
def test_documents_are_padded_one_by_one_where_no_attention_keeps_them_apart(family: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"family": family, "packing": True, "gradient_accumulation_steps": 2}
    options |= {"include_num_input_tokens_seen": "all"}
    ours = train(FastSFTTrainer, tmp_path / "ours", **options)
    report = ours.fastpack_report
    assert (report["packed_attention"].status, report["batches"].path) == ("stock", "documents")
    assert report.facts["padded tokens per token"].startswith("up to ")
    if family in ("stablelm", "nemotron"):  # stock's own rows are right
        stock = train(SFTTrainer, tmp_path / "stock", **options)
        assert_same_log(ours, stock)
        assert ours.state.num_input_tokens_seen == stock.state.num_input_tokens_seen > 0


def test_predictions_of_padded_documents_have_every_token_of_the_rows(tmp_path: Path) -> None:
    def counted(found: Any) -> dict[str, int]:
        return {"tokens": int((found.label_ids != -100).sum())}

    tokens = []
    for family in ("qwen3", "bloom"):  # one row, and its documents
        options: dict[str, Any] = {"family": family, "packing": True, "per_device_eval_batch_size": 2}
        trainer = build(FastSFTTrainer, tmp_path, trainer={"compute_metrics": counted}, **options)
        assert len(trainer.eval_dataset) % 2
        predicted = trainer.predict(trainer.eval_dataset)
        tokens.append((trainer.evaluate()["eval_tokens"], int((predicted.label_ids != -100).sum())))
        assert predicted.predictions.shape[:2] == predicted.label_ids.shape
    assert tokens[0] == tokens[1]


def _model_state(model: Any) -> dict[str, Any]:
    return {
        "implementation": model.config._attn_implementation,
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "windows": [name for name, module in model.named_modules() if hasattr(module, "_fastpack_window")],
    }


def test_model_is_as_stock_made_it_after_training_and_after_an_exception(tmp_path: Path) -> None:
    stock = train(SFTTrainer, tmp_path / "stock", packing=True)
    ours = train(FastSFTTrainer, tmp_path / "ours", packing=True)
    assert _model_state(ours.model) == _model_state(stock.model)

    class Stop(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("stopped in a callback")

    model = tiny_model("qwen3")
    with pytest.raises(RuntimeError, match="stopped in a callback"):
        train(FastSFTTrainer, tmp_path / "stopped", model=model, packing=True, trainer={"callbacks": [Stop()]})
    assert _model_state(model) == _model_state(stock.model)


def test_masks_are_built_once_per_batch_and_nothing_is_alive_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[PackedBatch] = []
    alive: list[weakref.ref[Any]] = []
    derive = PackedBatch.derive

    def record(self: PackedBatch, key: Any, build: Any) -> Any:
        value = derive(self, key, build)
        for band in value.masks.values() if key[0] == "per_document" else ():
            if not any(reference() is band for reference in alive):
                alive.append(weakref.ref(band))
        if self not in batches:
            batches.append(self)
        return value

    step = FastSFTTrainer.training_step

    def check(self: FastSFTTrainer, *args: Any, **kwargs: Any) -> Any:
        # Not before: a process's first training probes attention with a batch of its own, which `batches` would keep.
        with monkeypatch.context() as patch:
            patch.setattr(PackedBatch, "derive", record)
            loss = step(self, *args, **kwargs)
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        assert not any(batch.derived.values for batch in batches)
        return loss

    monkeypatch.setattr(FastSFTTrainer, "training_step", check)
    train(
        FastSFTTrainer, tmp_path, family="gemma3_text", packing=True, gradient_accumulation_steps=3,
        fast={"verify_packing": "off"},
    )  # fmt: skip
    assert alive
    assert len(batches) > 3
    for batch in batches:
        assert set(batch.build_counts.values()) == {1}


def test_compute_metrics_and_predict_get_stocks_padded_batches(tmp_path: Path) -> None:
    shapes: dict[str, list[Any]] = {}

    def run(cls: type[SFTTrainer]) -> Any:
        seen = shapes.setdefault(cls.__name__, [])

        def metrics(prediction: Any) -> dict[str, float]:
            seen.append(prediction.predictions.shape)
            return {"sum": float(np.abs(prediction.predictions).sum())}

        runner = train(cls, tmp_path / cls.__name__, trainer={"compute_metrics": metrics})
        prediction = runner.predict(runner.eval_dataset)
        return runner, prediction

    (ours, mine), (stock, theirs) = run(FastSFTTrainer), run(SFTTrainer)
    assert_same_log(ours, stock, rtol=1e-4)
    assert mine.predictions.shape == theirs.predictions.shape
    assert shapes["FastSFTTrainer"] == shapes["SFTTrainer"]


def test_streaming_with_max_steps(tmp_path: Path) -> None:
    ours, stock = both(tmp_path, data=make_dataset("text").to_iterable_dataset(), packing=True, eval_strategy="no")
    assert isinstance(ours.train_dataset, IterableDataset)
    assert_same_log(ours, stock)
    assert ours.fastpack_report["batches"].path == "packed"
    assert "unknown" in ours.fastpack_report.facts["truncated tokens"]


@pytest.mark.parametrize(
    ("why", "feature", "reason"),
    [
        ("disabled", "fastpack", "FASTPACK_DISABLE"),
        ("off", "packed_attention", "switched off"),
        ("moved", "fastpack", "torch, transformers or trl lacks trl.SFTTrainer._renamed_upstream"),
    ],
)
def test_where_ours_does_not_run_the_figures_are_those_of_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, feature: str, reason: str
) -> None:
    entered: list[Any] = []
    if why == "disabled":
        monkeypatch.setenv("FASTPACK_DISABLE", "1")
        monkeypatch.setattr(seam, "read_features", entered.append)
    elif why == "moved":
        monkeypatch.setitem(NEEDS, "batches", (*NEEDS["batches"], "trl.SFTTrainer._renamed_upstream"))
    ours, stock = both(tmp_path, packing=True, fast={"packed_attention": "off"} if why == "off" else None)
    assert figures(ours) == figures(stock)
    assert not entered
    assert reason in ours.fastpack_report[feature].reason


def test_a_custom_collator_is_kept(tmp_path: Path) -> None:
    collator = DataCollatorForSeq2Seq(make_tokenizer())
    custom = train(FastSFTTrainer, tmp_path, data="tokens", trainer={"data_collator": collator})
    assert "custom data collator" in custom.fastpack_report["batches"].reason


def test_collator_and_context_manager_serve_the_stock_trainer(tmp_path: Path) -> None:
    packed = build(SFTTrainer, tmp_path, packing=True)
    packed.data_collator = PackingCollator(pad_token_id=0)
    with seam.packed_attention(packed.model) as attention:
        packed.train()
    assert attention.path == "per_document"
    assert_same_log(packed, train(SFTTrainer, tmp_path, packing=True))


def test_a_collator_set_after_construction_is_used(tmp_path: Path) -> None:
    """As `train_on_responses_only` of other libraries does."""
    calls = []

    class Masking(DataCollatorForLanguageModeling):
        def torch_call(self, examples: Any) -> Any:
            calls.append(len(examples))
            return super().torch_call(examples)

    trainer = make_trainer(tmp_path, make_dataset("tokens"), packing=True, max_steps=2)
    trainer.data_collator = Masking(pad_token_id=0, padding_free=True)
    trainer.train()
    assert calls
    assert "custom data collator Masking" in trainer.fastpack_report["batches"].reason
    assert trainer.fastpack_report["verify_packing"].path == "proof of stock"


def test_signature_and_help_are_those_of_stock() -> None:
    for name in ("__init__", "train", "evaluate", "predict", "training_step", "prediction_step"):
        ours, stock = getattr(FastSFTTrainer, name), getattr(SFTTrainer, name)
        assert inspect.signature(ours) == inspect.signature(stock), name
        assert ours.__doc__ == stock.__doc__


def test_data_that_only_stock_can_train_on_is_left_to_it(tmp_path: Path) -> None:
    fixed = Dataset.from_dict(
        {"input_ids": [[5, 6, 7, 8]] * 8}, features=Features({"input_ids": List(Value("int64"), length=4)})
    )
    make_trainer(tmp_path, fixed, max_steps=1).train()
    first_label = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 4, "labels": [[-1, 6, 7]] * 4})
    make_trainer(tmp_path, first_label, max_steps=1, packing=True).train()
    with pytest.raises(ValueError, match="No columns in the dataset match"):
        trainer = make_trainer(tmp_path, make_dataset("tokens"), packing=True, max_steps=1)
        trainer.predict(make_dataset("text"))


@pytest.mark.parametrize("packing", [True, False])
def test_any_data_set_is_evaluated_before_in_the_middle_of_and_after_training(packing: bool, tmp_path: Path) -> None:
    class Evaluates(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trainer.evaluate(make_dataset("text", 6, seed=3))

    logs = []
    for cls in (FastSFTTrainer, SFTTrainer):
        callback = Evaluates()
        trainer = callback.trainer = build(cls, tmp_path, packing=packing, trainer={"callbacks": [callback]})
        trainer.evaluate({"train": make_dataset("text", 6, seed=4)})
        trainer.train()
        trainer.evaluate(make_dataset("text", 6, seed=5))
        logs.append(trainer)
    assert_same_log(*logs)


def test_data_without_a_loss_is_named(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"input_ids": [[5], [6], [7], [8]]})
    trainer = make_trainer(tmp_path, rows, packing=True)
    assert trainer.fastpack_report.facts["loss tokens"].startswith("none")
    counted = make_trainer(tmp_path, make_dataset("tokens"), packing=True)
    assert "loss tokens" not in counted.fastpack_report.facts
    expected = sum(len(row) - 1 for row in make_dataset("tokens")["input_ids"])
    assert counted_tokens(counted.train_dataset) == expected


def test_report_names_fill_truncation_and_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = train(FastSFTTrainer, tmp_path, packing=True, max_length=16)
    printed = capsys.readouterr().out
    report = ours.fastpack_report
    lengths = [len(row) for row in make_dataset("tokens")["input_ids"]]
    lost = sum(max(0, length + 1 - 16) for length in lengths)  # TRL appends the end token to plain text
    assert f"{lost:,} tokens" in report.facts["truncated tokens"]
    assert "packing_strategy='bfd_split'" in report.facts["truncated tokens"]
    assert report.facts["packing fill"].endswith("16 tokens")
    assert report["verify_packing"].reason.startswith("proven")
    assert report.banner() in printed
    assert set(report.to_dict()) == {"features", "facts"}
    assert ours.fastpack_proof is not None
    rows = make_trainer(tmp_path, make_dataset("tokens"), max_length=16)
    assert "cut by max_length=16; max_length=" in rows.fastpack_report.facts["truncated tokens"]
    assert "packing_strategy" not in rows.fastpack_report.facts["truncated tokens"], "nothing is packed"


def test_a_failed_proof_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that see each other after all: `auto` goes over to padded rows, an explicit choice stops."""
    from fastpack_trl.attention.per_document import PerDocument

    prepare = PerDocument.prepare

    def leaking(self: Any, batch: PackedBatch, *where: Any) -> Any:
        return prepare(self, PackedBatch.from_lengths((batch.total_tokens,)), *where)

    monkeypatch.setattr(PerDocument, "prepare", leaking)
    for module in (feature, seam):  # it passes its trial, and leaks in the model
        monkeypatch.setattr(module, "failure", lambda *_: "")
    ours = train(FastSFTTrainer, tmp_path / "ours", packing=True)
    assert "failed its proof" in ours.fastpack_report["packed_attention"].reason
    assert ours.fastpack_run.plan.kind == "documents", "an evaluation after training must not take the path that failed"
    assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", packing=True))
    with pytest.raises(PackingError, match=r"LEAK.*set packing=False"):
        train(FastSFTTrainer, tmp_path, packing=True, fast={"packed_attention": "per_document"})


def make_trainer(folder: Path, dataset: Dataset, **options: Any) -> FastSFTTrainer:
    given = {"train_dataset": dataset, "eval_dataset": None}
    return build(FastSFTTrainer, folder, data="tokens", trainer=given, eval_strategy="no", **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"input_ids": []}, "train_dataset is empty"),
        ({"input_ids": [[]]}, "no token: all 1 documents are empty"),
        ({"input_ids": [[1, 2, 3]], "labels": [[1, 2]]}, "row 0 .* has 2 labels for 3 input_ids"),
        ({"input_ids": [[1, 2, 96]]}, "96 in 'input_ids', outside the model's vocabulary of 96"),
        ({"input_ids": [[1, -2, 5]]}, "-2 in 'input_ids', outside"),
        ({"input_ids": [[1, 2, 5]], "labels": [[1, 2, 500]]}, "500 in 'labels', outside"),
        ({"text": ["w1 w2", None]}, "row 1 of the train data set .*cannot be prepared"),
        ({"body": ["w1 w2"]}, "row 0 of the train data set .*cannot be prepared .KeyError"),
    ],
)
def test_bad_data_is_named_before_the_first_step(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, Dataset.from_dict(rows), packing=True).train()


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [[5, 6, 7], [], [8, 9], [], [10]]
    trainer = make_trainer(tmp_path, Dataset.from_dict({"input_ids": rows}), packing=True, max_steps=1)
    assert trainer.fastpack_report.facts["skipped empty documents"] == 2
    trainer.train()


def test_a_model_or_length_that_cannot_train_is_refused(tmp_path: Path) -> None:
    data = make_dataset("tokens")
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1"):
        make_trainer(
            tmp_path, data, model=tiny_model("qwen3", attention_dropout=0.1), fast={"packed_attention": "per_document"}
        )
    with pytest.raises(ValueError, match="max_length=0 is below 1"):
        make_trainer(tmp_path, data, max_length=0)
    with pytest.raises(ValueError, match="BertModel cannot generate"):
        make_trainer(tmp_path, data, model=BertModel(BertConfig(hidden_size=8, num_attention_heads=1, vocab_size=96)))
