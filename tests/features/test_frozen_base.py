"""``frozen_base="fp8"``: a whole run over a base in FP8, by the reference on the CPU; what refuses; what is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import (
    LAYERS,
    At,
    adapted,
    assert_as_loaded,
    fast_layers,
    fp8_checkpoint,
    gpt2,
    left_in_fp32,
    lora_layers,
    made,
    quantized,
    weights,
)
from torch import Tensor

from fastpack_trl import apply_lora
from fastpack_trl.features import frozen_base
from fastpack_trl.lora.base_weight import Fp8Weight, from_4bit
from fastpack_trl.run import Run
from fastpack_trl.testing import tiny_model

BY_DEVICE = frozen_base._refused_by_device


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")


def in_fp8(model: Any) -> int:
    return sum(isinstance(layer.fastpack_dense, Fp8Weight) for layer in fast_layers(model))


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.usefixtures("varlen_on_the_cpu")
def test_fp8_learns_as_the_loaded_base(tmp_path: Path) -> None:
    model = adapted("qwen3")
    before, other, inside = weights(model), copy.deepcopy(model), At(in_fp8)
    ours = made(tmp_path / "fp8", model, [inside])
    ours.train()
    plain = made(tmp_path / "plain", other, frozen_base="as_loaded")
    plain.train()
    assert inside.found == LAYERS
    line = ours.fastpack_report["frozen_base"]
    assert (line.status, line.path) == ("on", "fp8")
    said = f"{LAYERS} of {LAYERS} LoRA bases multiply in FP8, forward and backward: results change"
    assert said in line.reason
    assert "frozen_base" not in plain.fastpack_report
    for name in ("loss", "eval_loss"):  # the evaluation is in FP8 too
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=0.01)
        assert logged(ours, name) != logged(plain, name)
    assert_as_loaded(ours.model, before)
    after = ours.evaluate()["eval_loss"]
    ours.args.frozen_base = "as_loaded"
    assert ours.evaluate()["eval_loss"] == after
    ours.create_model_card(model_name="tiny")
    card = (tmp_path / "fp8" / "README.md").read_text(encoding="utf-8")
    assert "`frozen_base` (fp8)" in card
    assert "LoRA bases multiply in FP8" in card


def test_after_an_error_the_base_is_as_loaded_for_the_next_run(tmp_path: Path) -> None:
    def act(_: Any) -> None:
        raise RuntimeError("stop")

    trainer = made(tmp_path, None, [At(act)], max_steps=1)
    before = weights(trainer.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            trainer.train()
        assert_as_loaded(trainer.model, before)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.arange(3, 20)[None]).logits
    return out


def test_a_call_without_adapters_and_a_generation_in_a_run_see_the_loaded_weights(tmp_path: Path) -> None:
    model = adapted("qwen3")
    with model.disable_adapter():
        expected = logits(model)

    def look(model: Any) -> Any:
        with model.disable_adapter():
            found = logits(model)
        model.eval()
        ids = model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
        model.train()
        return found, ids.shape, in_fp8(model)

    looked = At(look)
    trainer = made(tmp_path, model, [looked], max_steps=2)
    trainer.train()
    torch.testing.assert_close(looked.found[0], expected)
    assert looked.found[1:] == ((1, 10), LAYERS)
    assert "ended the run as loaded" not in trainer.fastpack_report["frozen_base"].reason


def _load(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def _merge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def _write(model: Any) -> None:
    for layer in lora_layers(model):
        layer.base_layer.weight.data = layer.base_layer.weight.data.clone()


@pytest.mark.parametrize("act", [_load, _merge, _write])
def test_what_touches_the_weights_ends_fp8_there_and_is_counted(tmp_path: Path, act: Any) -> None:
    model = adapted("qwen3")
    before = weights(model)
    trainer = made(tmp_path, model, [At(act)], max_steps=3, gradient_checkpointing=True)
    trainer.train()
    assert f"{LAYERS} of {LAYERS} layers ended the run as loaded" in str(trainer.fastpack_report["frozen_base"])
    for layer, weight in zip(lora_layers(trainer.model), before, strict=True):
        torch.testing.assert_close(layer.base_layer.weight, weight, rtol=1e-5, atol=1e-6)


def test_a_4_bit_base_is_quantized_from_its_dense_values(tmp_path: Path) -> None:
    inside = At(lambda model: [layer.fastpack_dense for layer in fast_layers(model)])
    trainer = made(tmp_path, left_in_fp32(quantized("nf4")), [inside])
    trainer.train()
    assert len(inside.found) == LAYERS
    for layer, base in zip(lora_layers(trainer.model), inside.found, strict=True):
        expected = Fp8Weight.of(from_4bit(layer.base_layer.weight).dense(torch.float32))
        assert torch.equal(base.weight.float(), expected.weight.float())


def mixture() -> Any:
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return adapted("qwen3_moe", target_modules=targets, target_parameters=stacks)


KINDS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "gpt2": (lambda: adapted(gpt2()), 8, ""),
    "bias": (lambda: adapted("qwen2"), 14, ""),
    "experts": (mixture, 8, "(LoRA on stacked parameters)"),
    "dropout and embeddings": (
        lambda: adapted("qwen3", lora_dropout=0.1, target_modules=["q_proj", "embed_tokens"]),
        2,
        "as loaded: 1 (lora.Embedding)",
    ),
    "odd sizes": (
        lambda: adapted(tiny_model("qwen3", intermediate_size=40)),
        8,
        "as loaded: 6 (dimensions that are not multiples of 16)",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_bases_of_every_kind_train_and_are_as_loaded_after_it(tmp_path: Path, name: str) -> None:
    make, layers, rest = KINDS[name]
    model = make()
    before = {name: own.detach().clone() for name, own in model.named_parameters() if "lora_" not in name}
    inside = At(in_fp8)
    trainer = made(tmp_path, model, [inside], max_steps=2)
    trainer.train()
    assert inside.found == layers, str(trainer.fastpack_report)
    assert rest in trainer.fastpack_report["frozen_base"].reason
    assert all(torch.equal(own, before[name]) for name, own in trainer.model.named_parameters() if "lora_" not in name)


def merged() -> Any:
    model = adapted("qwen3")
    model.merge_adapter()
    return model


REFUSED: dict[str, tuple[dict[str, str], Callable[[], Any], str]] = {
    "full": ({}, lambda: tiny_model("qwen3"), "full fine-tuning changes the weights"),
    "lora-off": ({"lora": "off"}, lambda: adapted("qwen3"), "set lora='auto'"),
    "int8": (
        {}, lambda: left_in_fp32(quantized("int8")),
        r"14 \(8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits\)",
    ),
    "dora": ({}, lambda: adapted("qwen3", use_dora=True), r"no LoRA layer supports it: 14 \(DoRA\)"),
    "merged": ({}, merged, r"14 \(merged adapters: call model.unmerge_adapter\(\) first\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantized_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    fields, model, match = REFUSED[name]
    trainer = made(tmp_path, model(), **fields)
    with pytest.raises(ValueError, match=match) as error:
        trainer.train()
    assert str(error.value).startswith("frozen_base='fp8': ")
    assert "set frozen_base='as_loaded'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_in_fp8_blocks_runs_peft_and_is_named() -> None:
    report = apply_lora(fp8_checkpoint())
    assert str(report) == "0 of 7 LoRA layers; PEFT's own: 7 (base of type FP8Linear)"


def test_devices_without_fp8_products_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", BY_DEVICE)
    with pytest.raises(ValueError, match="a cpu device has no FP8 matmuls: train on a CUDA device from Ada or Hopper"):
        made(tmp_path).train()


def test_sharded_parameters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "is_sharded", True)
    trainer = made(tmp_path)
    reasons = list(filter(None, frozen_base.why_not(trainer.fastpack_run)))
    assert "parameters are sharded while the step runs: train with DDP" in reasons
