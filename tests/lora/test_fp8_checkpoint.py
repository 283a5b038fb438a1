"""``frozen_base="fp8"`` over transformers' FP8 checkpoints: their own values and block scales, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting
from fp8_checkpoint_material import LAYERS, SHAPE, dense_twin, fp8_checkpoint, weight_of, with_lora
from fp8_values import matrix
from frozen_base_material import At, logged, lora_layers, made
from lora_material import compiled_projection, functions_for_every_size  # noqa: F401
from torch import Tensor

from fastpack_trl import apply_lora
from fastpack_trl.compile import layer_compile as feature
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.kernels.fp8 import LARGEST, LEAST, padded, quantise_rows_torch
from fastpack_trl.lora import frozen_base
from fastpack_trl.lora.base_weight import Fp8Weight, _multiplies_blocks, reason_against_layout
from fastpack_trl.lora.fp8_layers import product_errors, put_in_fp8
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.lora.report import FrozenCopies

pytestmark = pytest.mark.usefixtures("varlen_on_the_cpu")

IN, OUT, RANK = 512, 1024, 4


def fast_layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FastLora)}


def base_layers(model: Any) -> list[Any]:
    return [layer.base_layer for layer in lora_layers(model)]


def a_layer(**fields: Any) -> Any:
    """An `FP8Linear` of a model, (1024, 512)."""
    return fp8_checkpoint(**fields).model.layers[0].mlp.gate_proj


def allowed(rows: Tensor, weight: Tensor) -> Tensor:
    """The error of ``rows W^T`` that rounding to FP8 in groups of 128 may make."""
    largest = rows.abs().view(len(rows), -1, 128).amax(-1).clamp(min=LEAST).repeat_interleave(128, 1)
    # Half a step: 3 bits of mantissa, and the least step of the format, 2**-9, in units of the scale.
    rounding = rows.abs() * 2.0**-4 + largest / LARGEST * 2.0**-10
    return rounding @ weight.abs().t()


@pytest.mark.usefixtures("functions_for_every_size")
@pytest.mark.parametrize("project", [lora_projection, compiled_projection])
@pytest.mark.parametrize("both_layouts", [False, True])
@pytest.mark.parametrize(
    ("kind", "tokens"), [("plain", 9), ("outlier", 9), ("zeros", 9), ("subnormal", 9), ("plain", 1)]
)
def test_output_and_gradients_are_those_of_the_dequantised_weight_but_for_the_rounding_of_activations(
    project: Callable[..., Tensor], both_layouts: bool, kind: str, tokens: int
) -> None:
    layer = a_layer()
    draw = torch.Generator().manual_seed(1)
    layer.weight_scale_inv.data *= torch.randn(layer.weight_scale_inv.shape, generator=draw).exp()
    exact, base = weight_of(layer), Fp8Weight.of_blocks(layer.weight, layer.weight_scale_inv, both_layouts=both_layouts)
    assert torch.equal(base.dense(torch.float64), exact.float().double())
    x, grad = matrix(kind, (tokens, IN), torch.float32), matrix(kind, (tokens, OUT), torch.float32)
    a, b = (torch.randn(shape, generator=draw) * 0.05 for shape in ((RANK, IN), (OUT, RANK)))
    leaves = [leaf.requires_grad_() for leaf in (x, a, b)]
    out = project(x, base, a, b)
    out.backward(grad)
    with torch.no_grad():
        x, a, b, grad = (each.double() for each in (x, a, b, grad))
        grad_x, grad_a, grad_b = (leaf.grad for leaf in leaves)
        # Both directions: rows, the weight along their contraction, the adapter likewise, and what was found.
        for rows, weight, adapter, found in ((x, exact, b @ a, out), (grad, exact.t(), (b @ a).t(), grad_x)):
            in_fp32 = 1e-5 * (rows.abs() @ (weight.abs() + adapter.abs()).t()) + 1e-40
            rounded = quantise_rows_torch(rows.float(), None, 128).dense().double()
            assert ((found - rounded @ weight.t() - rows @ adapter.t()).abs() <= in_fp32).all()
            assert ((found - rows @ (weight + adapter).t()).abs() <= allowed(rows, weight) + in_fp32).all()
        for found, true in ((grad_a, (grad @ b).t() @ x), (grad_b, grad.t() @ (x @ a.t()))):
            assert (found - true).norm() <= 1e-5 * true.norm() + 1e-30


def test_a_group_with_an_outlier_costs_no_other_group() -> None:
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(0))
    plain = quantise_rows_torch(x, None, 128)
    x[0, 3] = 1e4
    hit = quantise_rows_torch(x, None, 128)
    assert torch.equal(hit.dense()[:, 128:], plain.dense()[:, 128:])
    assert torch.equal(hit.dense()[1:], plain.dense()[1:])


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 6, 8])
def test_rows_are_padded_to_what_the_device_reads_at_once(rows: int) -> None:
    a = quantise_rows_torch(torch.randn(rows, IN), None, 128)
    found = padded(a)
    assert found.values.shape[0] == max(4, -(-rows // 4) * 4) == found.scales.shape[0]
    assert found.values.is_contiguous()
    assert found.scales.stride() == (1, found.values.shape[0])
    assert torch.equal(found.values[:rows].float(), a.values.float())
    assert torch.equal(found.scales[:rows], a.scales)


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize(
    ("family", "layer_compile"),
    [("qwen3", "off"), pytest.param("qwen3", "on", marks=pytest.mark.slow), ("qwen2", "off")],
)
def test_a_run_learns_as_one_over_the_dequantised_base(
    tmp_path: Path, family: str, layer_compile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = Counting(differentiate=True)
    monkeypatch.setattr(feature, "compiled_layers", partial(compiled_layers, _backend=graphs))
    base = fp8_checkpoint(family)
    twin, model = with_lora(dense_twin(base)), with_lora(base)
    before = {name: value.clone() for name, value in base.state_dict().items() if "lora_" not in name}

    def look(model: Any) -> Any:
        layers = list(fast_layers(model).values())
        own = [layer.fastpack_dense.weight.data_ptr() == layer.base_layer.weight.data_ptr() for layer in layers]
        return own, [layer.fastpack_on_host for layer in layers]

    looked = At(look)
    ours = made(tmp_path / "fp8", model, [looked], layer_compile=layer_compile, cache_dequantized="on")
    ours.train()
    assert looked.found == ([True] * LAYERS, [None] * LAYERS)
    assert ours.fastpack_run.packs, "checked without the kernel that TRL's forward of FP8 weights needs"
    assert bool(graphs.graphs) == (layer_compile == "on")
    reason = ours.fastpack_report["frozen_base"].reason
    assert f"{LAYERS} of {LAYERS} LoRA bases multiply in FP8, forward and backward" in reason
    assert f"{LAYERS} with the values and block scales of the checkpoint, not quantised again" in reason
    assert "the loaded weights stay on the device" in reason
    plain = made(tmp_path / "plain", twin, frozen_base="as_loaded", layer_compile="off")
    plain.train()
    for name in ("loss", "eval_loss"):
        assert logged(ours, name) == pytest.approx(logged(plain, name), rel=0.01)
        assert logged(ours, name) != logged(plain, name)
    ours.train()  # once more, from the same base
    assert not fast_layers(ours.model)
    after = {name: value for name, value in base.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(value.view(torch.uint8), after[name].view(torch.uint8)) for name, value in before.items())


def test_as_loaded_it_is_pefts_and_counted() -> None:
    model = with_lora(fp8_checkpoint())
    report = apply_lora(model)
    assert not fast_layers(model)
    assert str(report) == f"0 of {LAYERS} LoRA layers; PEFT's own: {LAYERS} (base of type FP8Linear)"


def test_a_fast_layer_without_an_fp8_weight_gives_the_call_to_peft_and_needs_no_copy() -> None:
    model = with_lora(fp8_checkpoint())
    report = apply_lora(model, cache_dequantized="on", compute_dtype=torch.bfloat16, fp8_bases=True)
    layers = fast_layers(model)
    assert len(layers) == LAYERS
    assert not FrozenCopies(list(layers.values()), torch.bfloat16)
    with suppress(ImportError):  # transformers' forward runs a kernel that may not be there
        layers["base_model.model.model.layers.0.self_attn.q_proj"](torch.randn(2, IN))
    assert report.call_by_call == {"an FP8 base as it was loaded": 1}


def test_merging_is_refused_by_peft_and_leaves_the_values() -> None:
    model = with_lora(fp8_checkpoint())
    before = [base.weight.float() for base in base_layers(model)]
    with pytest.raises(RuntimeError, match="Float8"):
        model.merge_adapter()
    assert all(torch.equal(base.weight.float(), old) for base, old in zip(base_layers(model), before, strict=True))


def test_errors_are_those_of_activations_alone() -> None:
    model = with_lora(fp8_checkpoint())
    apply_lora(model, fp8_bases=True)
    name, layer = next(iter(fast_layers(model).items()))
    put_in_fp8(layer, torch.float32, both_layouts=False, to_host=True)
    exact = 2.0 ** torch.randint(-3, 3, (5, IN), generator=torch.Generator().manual_seed(0))
    errors = [product_errors({name: layer}, torch.float32, lambda x=x: layer(x))[name] for x in (exact, exact + 0.01)]
    assert errors[0][0] < 1e-6  # powers of two are FP8 values
    assert 1e-3 < errors[1][0] < 0.05
    assert all(0.01 < backward < 0.05 for _, backward in errors)


def test_the_plan_counts_the_second_layout_alone() -> None:
    model = with_lora(fp8_checkpoint())
    layers = {str(at): layer for at, layer in enumerate(lora_layers(model))}
    nbytes = sum(layer.base_layer.weight.nbytes for layer in layers.values())
    for on_host in (False, True):
        assert frozen_base._both_layouts(layers, 4 * nbytes, on_host=on_host)
        assert not frozen_base._both_layouts(layers, 4 * nbytes - 4, on_host=on_host)
        assert not frozen_base._both_layouts(layers, 0, on_host=on_host)


def test_scales_that_are_powers_of_two_are_taken_exactly() -> None:
    layer = a_layer(scale_fmt="ue8m0")
    assert layer.weight_scale_inv.dtype == torch.float8_e8m0fnu
    base = Fp8Weight.of_blocks(layer.weight, layer.weight_scale_inv, both_layouts=False)
    assert torch.equal(base.dense(torch.float64), weight_of(layer))
    assert not reason_against_layout(layer)


SIZES = "an FP8 base with dimensions that are no multiples of 512"
BLOCKS = "an FP8 base whose scales are not of blocks of 128 x 128"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "per-tensor": ({"weight_block_size": None}, BLOCKS),
    "64": ({"weight_block_size": (64, 64)}, BLOCKS),
    "static": ({"activation_scheme": "static"}, "an FP8 base with fixed scales of activations"),
    "sizes": (
        {"shape": SHAPE | {"intermediate_size": 640}},
        "an FP8 base with dimensions that are no multiples of 512",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_stay_as_loaded_named_with_the_remedy(name: str) -> None:
    fields, reason = OTHERS[name]
    report = apply_lora(with_lora(fp8_checkpoint(**fields)), fp8_bases=True)
    others = {f"{reason}: load it with FineGrainedFP8Config(dequantize=True)": 3 if name == "sizes" else LAYERS}
    assert {why: len(layers) for why, layers in report.handed_over.items()} == others


def test_a_layer_that_was_made_dense_or_has_another_form_stays_as_loaded() -> None:
    layer = a_layer()
    layer.weight = torch.nn.Parameter(layer.weight.bfloat16(), requires_grad=False)
    assert "with weights in torch.bfloat16" in reason_against_layout(layer)
    del layer.weight_scale_inv
    assert "an FP8 base without weight_scale_inv" in reason_against_layout(layer)


@pytest.mark.parametrize(("capability", "cuda", "fits"), [
    ((9, 0), "12.9", True), ((9, 0), "13.0", True), ((9, 0), "12.8", False), ((8, 9), "13.0", False),
    ((10, 0), "13.0", False), ((9, 0), None, False),
])  # fmt: skip
def test_blocks_are_multiplied_by_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str | None, fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert _multiplies_blocks(torch.device("cuda")) is fits


@pytest.mark.usefixtures("on_any_device")
@pytest.mark.parametrize("name", ["64", "error"])
def test_a_run_without_a_layer_that_can_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = with_lora(fp8_checkpoint(**(OTHERS[name][0] if name in OTHERS else {})))
    match = rf"no LoRA layer can have it: {LAYERS} \(an FP8 base whose .*: load it with FineGrainedFP8Config"
    if name == "error":
        match = f"products of all {LAYERS} layers are off by more than 8%"
        monkeypatch.setattr(frozen_base, "product_errors", lambda layers, *_: dict.fromkeys(layers, (0.5, 0.01)))
    trainer = made(tmp_path, model)
    with pytest.raises(ValueError, match=match):
        trainer.train()
    assert not fast_layers(trainer.model)
    assert not any(name.startswith("fastpack") for layer in base_layers(model) for name in vars(layer))
