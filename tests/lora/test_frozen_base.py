"""``frozen_base="fp8"``: a whole run over a base in FP8, by the reference on the CPU; what refuses; what is left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting
from frozen_base_material import LAYERS, At, assert_as_loaded, fast_layers, logged, lora_layers, made, weights
from lora_material import adapted
from quantised_material import quantised
from ranks import fork_ranks
from torch import Tensor
from trainer_material import figures
from transformers import GPT2Config, GPT2LMHeadModel

from fastpack_trl.compile import layer_compile as feature
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.kernels import fp8
from fastpack_trl.lora import fp8_layers, frozen_base
from fastpack_trl.lora.base_weight import Fp8Weight
from fastpack_trl.testing import tiny_model

pytestmark = pytest.mark.usefixtures("on_any_device")
BY_DEVICE = frozen_base._refused_by_device


@pytest.mark.usefixtures("varlen_on_the_cpu")
@pytest.mark.parametrize("layer_compile", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_a_run_learns_as_one_over_the_loaded_base_and_leaves_it(
    tmp_path: Path, layer_compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Counting(differentiate=True)
    monkeypatch.setattr(feature, "compiled_layers", partial(compiled_layers, _backend=graphs))
    model = adapted("qwen3")
    before, other = weights(model), copy.deepcopy(model)
    inside = At(lambda model: [isinstance(layer.fastpack_dense, Fp8Weight) for layer in fast_layers(model)])
    ours = made(tmp_path / "fp8", model, [inside], layer_compile=layer_compile)
    ours.train()
    plain = made(tmp_path / "plain", other, frozen_base="as_loaded", layer_compile="off")
    plain.train()
    assert inside.found == [True] * LAYERS
    assert bool(graphs.graphs) == (layer_compile == "on")
    line = ours.fastpack_report["frozen_base"]
    assert (line.status, line.path) == ("on", "fp8")
    said = f"{LAYERS} of {LAYERS} LoRA bases multiply in FP8, forward and backward: what is computed changes"
    assert said in str(line)
    assert "frozen_base" not in plain.fastpack_report
    assert logged(ours, "loss") != logged(plain, "loss")
    for name in ("loss", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=0.01)
    assert_as_loaded(ours.model, before)


def test_evaluation_in_a_run_is_in_fp8_and_after_it_as_loaded(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=2, eval_steps=2)
    trainer.train()
    (inside,) = logged(trainer, "eval_loss")
    after = trainer.evaluate()["eval_loss"]
    assert after != inside
    assert after == pytest.approx(inside, rel=0.01)
    trainer.args.frozen_base = "as_loaded"
    assert trainer.evaluate()["eval_loss"] == after


def test_loaded_weights_wait_on_the_host_and_checkpoints_have_no_trace(tmp_path: Path) -> None:
    model = adapted("qwen3")
    before = weights(model)

    def look(model: Any) -> Any:
        layers = fast_layers(model)
        stubs = [layer.base_layer.weight for layer in layers]
        saved = [layer.base_layer.state_dict()["weight"] for layer in layers]
        return [bool(stub.isnan().all()) and stub.untyped_storage().nbytes() == 4 for stub in stubs], saved

    looked = At(look)
    trainer = made(tmp_path, model, [looked], save_strategy="steps", save_steps=2)
    trainer.train()
    hollow, saved = looked.found
    assert hollow == [True] * LAYERS
    assert all(torch.equal(*pair) for pair in zip(saved, before, strict=True))
    resumed = made(tmp_path, adapted("qwen3"), save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for row, expected in zip(figures(resumed), figures(trainer), strict=True):
        for name in row.keys() & {"loss", "eval_loss", "grad_norm"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_run_and_after_an_error_the_base_is_as_loaded_for_the_next_run(tmp_path: Path, fails: bool) -> None:
    def act(_: Any) -> None:
        if fails:
            raise RuntimeError("stop")

    trainer = made(tmp_path, None, [At(act)], max_steps=1)
    before = weights(trainer.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop") if fails else nullcontext():
            trainer.train()
        assert_as_loaded(trainer.model, before)


@pytest.mark.parametrize("moment", ["merged", "disabled"])
def test_merging_and_disabling_adapters_in_a_run_see_the_loaded_weights(tmp_path: Path, moment: str) -> None:
    model = adapted("qwen3")
    ids = torch.arange(3, 20)[None]

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(input_ids=ids).logits
        return out

    with model.disable_adapter():
        expected = logits(model)

    def look(model: Any) -> Any:
        if moment == "disabled":
            with model.disable_adapter():
                return logits(model)
        model.merge_adapter()
        merged = [layer.base_layer.weight.isfinite().all() for layer in lora_layers(model)]
        model.unmerge_adapter()
        return merged

    looked = At(look)
    trainer = made(tmp_path, model, [looked])
    trainer.train()
    if moment == "disabled":
        torch.testing.assert_close(looked.found, expected)
    else:
        assert all(looked.found)
    assert max(logged(trainer, "loss")) < 10


def test_a_4_bit_base_is_quantised_from_its_dense_values(tmp_path: Path) -> None:
    model = quantised("nf4")
    inside = At(lambda model: [layer.fastpack_dense for layer in fast_layers(model)])
    trainer = made(tmp_path, model, [inside])
    trainer.train()
    assert len(inside.found) == LAYERS
    for layer, base in zip(lora_layers(trainer.model), inside.found, strict=True):
        expected = Fp8Weight.of(fp8_layers.dense_weight(layer, torch.float32), both_layouts=True)
        assert torch.equal(base.weight.float(), expected.weight.float())
    assert "the loaded weights stay on the device" in trainer.fastpack_report["frozen_base"].reason


@pytest.mark.parametrize(
    ("family", "layers", "rest"),
    [
        ("gpt2", 8, ""), ("qwen2", 14, ""), ("phi3", 8, ""), ("qwen3_moe", 8, "(LoRA on stacked parameters)"),
        ("dropout and embeddings", 2, "as loaded: 1 (lora.Embedding)"),
    ],
)  # fmt: skip
def test_bases_of_every_kind_train_and_are_as_loaded_after_it(
    tmp_path: Path, family: str, layers: int, rest: str
) -> None:
    if family == "qwen3_moe":
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = adapted(family, target_modules=targets, target_parameters=stacks)
    elif family == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=96, pad_token_id=0)
        model = adapted(GPT2LMHeadModel(config))
    elif family == "dropout and embeddings":
        model = adapted("qwen3", lora_dropout=0.1, target_modules=["q_proj", "embed_tokens"])
    else:
        model = adapted(family)
    before = {name: own.detach().clone() for name, own in model.named_parameters() if "lora_" not in name}
    inside = At(lambda model: sum(isinstance(layer.fastpack_dense, Fp8Weight) for layer in fast_layers(model)))
    trainer = made(tmp_path, model, [inside], max_steps=2)
    trainer.train()
    assert inside.found == layers, str(trainer.fastpack_report)
    assert rest in trainer.fastpack_report["frozen_base"].reason
    assert all(torch.equal(own, before[name]) for name, own in trainer.model.named_parameters() if "lora_" not in name)


def test_a_model_generates_in_the_middle_of_a_run(tmp_path: Path) -> None:
    def generate(model: Any) -> Tensor:
        model.eval()
        with torch.no_grad():
            ids: Tensor = model.generate(input_ids=torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
        model.train()
        return ids

    generated = At(generate)
    made(tmp_path, None, [generated], max_steps=2).train()
    assert generated.found.shape == (1, 10)


def test_layers_that_cannot_or_lose_too_much_stay_as_loaded_and_are_counted(tmp_path: Path) -> None:
    base = tiny_model("qwen3", intermediate_size=40)  # no multiple of 16
    attention = base.model.layers[0].self_attn
    with torch.no_grad():  # one row is all of the product, and its values are below the smallest step of their scale
        attention.q_proj.weight[:, 1:] *= 1e-6
        attention.q_proj.weight[:, 0] = 0
        attention.q_proj.weight[0, 0] = 1e30
    errors = {}
    model = adapted(base)
    inside = At(lambda model: [isinstance(layer.fastpack_dense, Fp8Weight) for layer in fast_layers(model)])
    trainer = made(tmp_path, model, [inside], max_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        real = frozen_base.product_errors

        def worse(*args: Any) -> Any:
            errors.update(real(*args))
            first = next(iter(errors))
            return errors | {first: (0.5, 0.01)}

        patch.setattr(frozen_base, "product_errors", worse)
        trainer.train()
    assert len(errors) == 8  # q, k, v, o of two layers
    assert sum(inside.found) == 7
    reason = trainer.fastpack_report["frozen_base"].reason
    assert "7 of 14 LoRA bases" in reason
    assert "as loaded: 6 (dimensions that are no multiples of 16)" in reason
    assert "as loaded: 1 (an error over 8%)" in reason


def test_the_second_layout_is_kept_in_a_quarter_of_what_is_free_beside_the_first() -> None:
    layers = {str(at): layer for at, layer in enumerate(lora_layers(adapted("qwen3")))}
    fp8 = sum(layer.in_features * layer.out_features for layer in layers.values())  # bytes of a layout
    assert frozen_base._both_layouts(layers, 5 * fp8, on_host=False)
    assert not frozen_base._both_layouts(layers, 5 * fp8 - 4, on_host=False)
    assert frozen_base._both_layouts(layers, fp8, on_host=True)  # fp32 weights leave four times as much
    with pytest.raises(ValueError, match=r"of FP8 weights do not fit the .* that are free on the device; set frozen"):
        frozen_base._both_layouts(layers, fp8 - 1, on_host=False)


def test_errors_are_of_what_each_layer_reads(tmp_path: Path) -> None:
    base = tiny_model("qwen3")
    trainer = made(tmp_path, adapted(base), max_steps=1)
    seen: dict[str, Any] = {}
    real = fp8_layers._errors

    def errors(x: Tensor, weight: Tensor) -> Tensor:
        seen[str(len(seen))] = x
        return real(x, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_layers, "_errors", errors)
        trainer.train()
    tokens = len(trainer.train_dataset[0]["input_ids"])
    assert len(seen) == LAYERS
    assert {len(x) for x in seen.values()} == {tokens}
    assert torch.equal(seen["0"], seen["1"])  # q and k read the same


REFUSED: dict[str, tuple[dict[str, str], Callable[[], Any], str]] = {
    "full": ({}, lambda: tiny_model("qwen3"), "full fine-tuning changes the weights"),
    "lora-off": ({"lora": "off"}, lambda: adapted("qwen3"), "set lora='auto'"),
    "int8": (
        {}, lambda: quantised("int8"), r"14 \(8-bit base, multiplied by bitsandbytes: load it in 16 or 4 bits\)"
    ),
    "dora": ({}, lambda: adapted("qwen3", use_dora=True), r"no LoRA layer can have it: 14 \(DoRA\)"),
    "merged": ({}, lambda: merged("qwen3"), r"14 \(merged adapters: call model.unmerge_adapter\(\) first\)"),
}  # fmt: skip


def merged(family: str) -> Any:
    model = adapted(family)
    model.merge_adapter()
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_quantised_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    fields, model, match = REFUSED[name]
    trainer = made(tmp_path, model(), **fields)
    with pytest.raises(ValueError, match=match) as error:
        trainer.train()
    assert str(error.value).startswith("frozen_base='fp8': ")
    assert "set frozen_base='as_loaded'" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_cpu_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", BY_DEVICE)
    with pytest.raises(ValueError, match=r"a cpu device has no FP8 products; train on .* or set frozen"):
        made(tmp_path).train()


@pytest.mark.parametrize(
    ("bf16", "failure", "match"),
    [
        (True, "no scales per row", "no FP8 products in torch.bfloat16: no scales per row; set frozen_base='as"),
        (False, "", "computes in torch.float32"),
        (True, "", ""),
    ],
)
def test_devices_and_dtypes_without_fp8_products_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, failure: str, match: str
) -> None:
    trainer = made(tmp_path, bf16=bf16)
    monkeypatch.setattr(frozen_base, "_refused_by_device", BY_DEVICE)
    monkeypatch.setattr(frozen_base, "failure_of_products", lambda *_: failure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A card")
    monkeypatch.setattr(type(trainer.fastpack_run), "device", torch.device("cuda"))
    refusal = frozen_base._refusal(trainer.fastpack_run)
    assert match in refusal
    assert bool(refusal) == bool(match)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("only on\nsome devices"), "only on"),  # torch 2.11
        (ValueError("Invalid scaling configuration"), "Invalid scaling configuration"),
        (None, ""),
    ],
)
def test_a_small_product_shows_what_the_device_lacks(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, failure: str
) -> None:
    def product(*arguments: Any) -> Tensor:
        if error is not None:
            raise error
        return fp8.scaled_product_torch(*arguments)

    monkeypatch.setattr(fp8, "scaled_product", product)
    assert fp8.failure_of_products(torch.device("cpu"), torch.bfloat16) == failure


def test_a_product_without_the_scales_of_each_row_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    per_tensor = lambda a, b, dtype: (a.values.float() @ b.values.float().t()).to(dtype)  # noqa: E731
    monkeypatch.setattr(fp8, "scaled_product", per_tensor)
    assert fp8.failure_of_products(torch.device("cpu"), torch.bfloat16) == "a small product is wrong"


def test_the_model_card_says_that_what_is_computed_differs(tmp_path: Path) -> None:
    trainer = made(tmp_path, max_steps=1)
    trainer.train()
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "`frozen_base` (fp8)" in card
    assert "LoRA bases multiply in FP8" in card
    assert "a product is off by" in card


@pytest.mark.slow
def test_two_ranks_train_under_ddp_and_are_refused_under_fsdp(tmp_path: Path) -> None:
    script = Path(__file__).with_name("fp8_ranks.py")
    fork_ranks(script, str(tmp_path), imports="torch.distributed.fsdp,trl:SFTTrainer,peft,fastpack_trl:FastSFTTrainer")
