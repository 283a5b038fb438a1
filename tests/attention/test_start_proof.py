"""The packing check when a run starts: what its outcome does to batches, and what a run does that it cannot check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_models import Bigrams, Noise, OneRow, Shift, Strict, capped_sdpa, model_with
from trainer_material import assert_same_log, build, figures, train
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from vision_material import vision_model

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import start_proof
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.errors import PackingError
from fastpack_trl.testing import FAMILIES, tiny_model

OFF = {"packed_attention": "off"}
LEAKING: dict[str, Any] = {"family": "gpt_oss", "packing": True, "max_steps": 1, "eval_strategy": "no"}


def trainer_of(cls: Any, folder: Path, model: Any = None, fast: Any = None, **more: Any) -> Any:
    return build(cls, folder, model=model or model_with(), fast=fast, eval_strategy="no", max_steps=1, **more)


def evaluated(trainer: Any) -> float:
    return float(trainer.evaluate()["eval_loss"])


def test_packing_under_stock_is_checked_and_a_leak_stops(tmp_path: Path) -> None:
    right = train(FastSFTTrainer, tmp_path, packing=True, fast=OFF)
    assert right.fastpack_report["verify_packing"].path == "proof of stock"
    assert right.fastpack_report["verify_packing"].reason.startswith("proven")
    message = r"proof with stock: LEAK.*set packed_attention='auto'; verify_packing='off'"
    with pytest.raises(PackingError, match=message):
        train(FastSFTTrainer, tmp_path, fast=OFF, **LEAKING)
    with pytest.raises(PackingError, match=r"LEAK.*torch_compile=True compiles.*leave that out, or set packing=False"):
        train(FastSFTTrainer, tmp_path, torch_compile=True, torch_compile_backend="eager", **LEAKING)
    strict = train(FastSFTTrainer, tmp_path / "ours", fast={**OFF, "verify_packing": "off"}, **LEAKING)
    assert figures(strict) == figures(train(SFTTrainer, tmp_path / "stock", **LEAKING))
    assert strict.fastpack_report["verify_packing"].reason == "switched off"


def test_weights_that_are_not_finite_are_named_and_nothing_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt() -> Any:
        model = tiny_model("qwen3")
        model.get_parameter(name).data.view(-1)[3] = torch.inf
        return model

    name, options = "model.layers.1.mlp.up_proj.weight", {"packing": True, "max_steps": 1, "eval_strategy": "no"}
    ours = train(FastSFTTrainer, tmp_path, model=spoilt(), **options)
    line = ours.fastpack_report["verify_packing"]
    assert (line.status, line.path) == ("off", "not run")
    assert name in line.reason
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert name in caplog.text
    with pytest.raises(ValueError, match=f"verify_packing='on': parameter {name} has non-finite values: 1 of 1,536"):
        train(FastSFTTrainer, tmp_path, model=spoilt(), fast={"verify_packing": "on"}, **options)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3 4-bit"])
def test_small_copy_leaks_under_stock_where_the_model_does(family: str) -> None:
    """It stands for a model whose parameters are in other processes."""
    two = tiny_model(family.split()[0]).config
    # The second kind of layer comes late.
    each = {name: [*value[:1] * 3, *value[1:] * 3] for name, value in vars(two).items()
            if isinstance(value, list) and len(value) == 2}  # fmt: skip
    model = tiny_model(family.split()[0], num_hidden_layers=6, **each)

    def leaks(one: Any) -> Any:
        try:
            return {pair[:2] for pair in verify_packing(one, implementation="off").leaks}
        except ValueError as error:
            return str(error)

    if family.endswith("4-bit"):
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    state = torch.get_rng_state()
    with start_proof.small_copy(model, torch.device("cpu"), None) as copy:
        assert leaks(copy) == leaks(model)
        assert copy.config.get_text_config().num_hidden_layers < 6
        kinds = set(getattr(model.config, "layer_types", None) or ())
        assert set(getattr(copy.config, "layer_types", None) or ()) == kinds
    assert torch.equal(torch.get_rng_state(), state)


class Own:
    """Neither stock's collator nor a kind of it: what it tells the model is not known."""

    def __init__(self, **given: Any) -> None:
        self.stock = DataCollatorForLanguageModeling(**given)

    def __call__(self, rows: Any) -> Any:
        return self.stock(rows)


def test_leak_under_a_collator_of_the_user_warns_and_under_a_kind_of_stocks_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(cls: Any, collator: Any, **more: Any) -> Any:
        trainer = build(cls, tmp_path / cls.__name__, **more)
        trainer.data_collator = collator  # TRL takes none at construction where rows are packed
        trainer.train()
        return trainer

    trained(FastSFTTrainer, Own(pad_token_id=0, padding_free=True), **LEAKING)
    assert "what Own makes of them is not examined" in caplog.text
    kind = type("Kind", (DataCollatorForLanguageModeling,), {})
    with pytest.raises(PackingError, match="custom data collator Kind"):
        trained(FastSFTTrainer, kind(pad_token_id=0, padding_free=True), **LEAKING)
    joining: dict[str, Any] = {"collator": DataCollatorForLanguageModeling(pad_token_id=0), "packing": True}
    with pytest.raises(PackingError, match=r"LEAK: every row is one document .* padding_free=False"):
        trained(FastSFTTrainer, **joining)
    ours = trained(FastSFTTrainer, **joining, fast={"verify_packing": "off"})
    assert_same_log(ours, trained(SFTTrainer, **joining))


@pytest.mark.parametrize("kind", [{"wrapper": Shift}, {"wrapper": Strict}, {"wrapper": Noise}, {"backbone": Bigrams}])
def test_rows_that_nobody_asked_to_pack_stay_padded_where_the_check_fails(tmp_path: Path, kind: Any) -> None:
    ours = train(FastSFTTrainer, tmp_path / "ours", model=model_with(**kind))
    assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", model=model_with(**kind)))
    line, runs = ours.fastpack_report["batches"], kind.get("wrapper") is not Strict
    assert line.status == "stock"
    unproven = "per_document failed its proof: " if runs else "rows without padding are not proven: "
    assert line.reason.startswith(unproven)
    ours.args.verify_packing = "off"
    if runs:
        ours.train()
        assert ours.fastpack_run.plan.kind == "padding_free", "verify_packing='off' insists"


@pytest.mark.parametrize(
    ("backbone", "reason"),
    [(OneRow, "the proof cannot run on this model: ValueError: one row at a time"), (Bigrams, "failed its proof")],
)
def test_packed_documents_are_padded_one_by_one_where_the_check_cannot_run_or_fails(
    tmp_path: Path, backbone: Any, reason: str
) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with(backbone=backbone), packing=True)
    ours.train()
    assert ours.fastpack_report["batches"].path == "documents"
    assert reason in ours.fastpack_report["packed_attention"].reason
    if backbone is OneRow:
        with pytest.raises(ValueError, match=r"verify_packing='on': .*set verify_packing='auto' or 'off'"):
            trainer_of(FastSFTTrainer, tmp_path, model_with(backbone=backbone), {"verify_packing": "on"}).train()


def test_rows_that_are_evaluated_before_training_are_checked_once(tmp_path: Path) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path)
    evaluated(ours)
    proof = ours.fastpack_proof
    assert proof.proven
    assert ours.fastpack_run.plan.kind == "padding_free"
    ours.predict(ours.eval_dataset)
    assert ours.fastpack_proof is proof
    ours.train()
    trained = ours.fastpack_proof
    assert trained is not proof
    evaluated(ours)
    assert ours.fastpack_proof is trained
    off = trainer_of(FastSFTTrainer, tmp_path, fast={"verify_packing": "off"})
    evaluated(off)
    assert (off.fastpack_proof, off.fastpack_run.plan.kind) == (None, "padding_free")


@pytest.mark.parametrize("steps", [1, 2])
def test_rows_of_one_document_are_checked_only_where_they_are_merged_or_evaluated(tmp_path: Path, steps: int) -> None:
    alone = trainer_of(FastSFTTrainer, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=steps)
    alone.eval_dataset, rows = None, alone.eval_dataset
    alone.train()
    assert (alone.fastpack_proof is None) == (steps == 1)
    alone.evaluate(rows)
    assert alone.fastpack_proof is not None


@pytest.mark.parametrize("attention", ["auto", "per_document"])
def test_evaluation_before_training_takes_stocks_batches_where_documents_leak(tmp_path: Path, attention: str) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with(Shift), {"packed_attention": attention})
    stock = trainer_of(SFTTrainer, tmp_path, model_with(Shift))
    assert evaluated(ours) == pytest.approx(evaluated(stock), rel=1e-6)
    assert "per_document failed its proof: " in ours.fastpack_report["batches"].reason
    assert ours.predict(ours.eval_dataset).metrics["test_loss"] == pytest.approx(evaluated(stock), rel=1e-6)


def test_attention_that_is_switched_in_the_middle_of_a_run_is_named_with_its_fix(tmp_path: Path) -> None:
    class Switch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.set_attn_implementation("eager")

    options = {"trainer": {"callbacks": [Switch()]}}
    with pytest.raises(PackingError, match=r"set to 'eager' in the middle of a run .*set packed_attention='off'"):
        trainer_of(FastSFTTrainer, tmp_path, **options).train()
    trainer_of(FastSFTTrainer, tmp_path, fast=OFF, **options).train()


def stock_loss_in(folder: Path, **options: Any) -> str:
    trained = train(FastSFTTrainer, folder, **{"fast": {}, "max_steps": 1, "eval_strategy": "no"} | options)
    line = trained.fastpack_report.to_dict()["facts"].get("stock loss", "")
    assert f"stock loss: {line}" in " ".join(trained.fastpack_report.banner().split()) or not line
    return str(line)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gpt_oss"])
def test_documents_that_leak_in_packed_rows_of_stock_are_in_the_banner(family: str, tmp_path: Path) -> None:
    def leaking() -> Any:
        return vision_model(family) if family == "qwen2_5_vl" else tiny_model(family)

    assert "6 of 12 pairs" in stock_loss_in(tmp_path, model=leaking(), packing=True)
    assert verify_packing(leaking()).proven
    assert not stock_loss_in(tmp_path, model=leaking()), "stock pads: nothing to leak"
    assert not stock_loss_in(tmp_path, packing=True), "stock keeps apart"
    off = {"verify_packing": "off"}
    assert not stock_loss_in(tmp_path, model=leaking(), packing=True, fast=off)


def test_softcap_that_stock_leaves_out_is_in_the_banner_and_compared_with_eager(tmp_path: Path) -> None:
    for packing in (False, True):
        assert "leaves out the softcap" in stock_loss_in(tmp_path, model=capped_sdpa(), packing=packing)
    model = capped_sdpa()
    assert verify_packing(model).proven
    eager = tiny_model("gemma2", attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    ours = train(FastSFTTrainer, tmp_path, model=model, packing=True, optim="sgd")
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert_same_log(ours, train(SFTTrainer, tmp_path, model=eager, packing=True, optim="sgd"), rtol=1e-4)
