"""FP8 products: what is quantised, and a run in miniature on the CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fp8_values import KINDS, matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from triton_cases import run_cases

from benchmarks import fp8_layer, fp8_products
from benchmarks.fp8_quantise import BLOCK, FP8, LARGEST, LEAST, quantise_blocks, quantise_rows_torch, quantise_tensor
from benchmarks.fp8_table import table
from benchmarks.model_shapes import MODELS, ModelShape
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import write_json

CASES = Path(__file__).with_name("triton_fp8_cases.py")
TINY = ModelShape(
    "qwen3",
    {
        "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64,
    },
)  # fmt: skip


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernels_equal_their_twins_under_the_interpreter() -> None:
    run_cases(CASES, interpret=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_kernels_equal_their_twins_on_cuda() -> None:
    run_cases(CASES, interpret=False)


values = st.floats(-(2.0**100), 2.0**100, width=32) | st.just(float("nan"))


@settings(deadline=None, max_examples=200)
@given(arrays("float32", st.tuples(st.integers(1, 4), st.just(16)), elements=values))
def test_a_value_is_off_by_a_sixteenth_or_by_the_smallest_step_of_its_row(x: object) -> None:
    rows = torch.from_numpy(x)
    found = quantise_rows_torch(rows)
    assert (found.scales > 0).all()
    assert torch.equal(found.values.isnan(), rows.isnan())
    largest = rows.nan_to_num().abs().amax(1, keepdim=True)
    # Half a step: of 3 bits of mantissa, or of the smallest value, 2**-9, times the scale.
    allowed = torch.maximum(rows.abs() / 16, largest.clamp(min=LEAST) / LARGEST * 2**-10) * (1 + 1e-5)
    assert ((found.dense() - rows).abs() <= allowed)[~rows.isnan()].all()
    assert (found.values.float()[rows == 0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_a_row_changes_no_other_row(kind: str) -> None:
    hard, plain = (quantise_rows_torch(matrix(each, (3, 32), torch.float32)) for each in (kind, "plain"))
    assert torch.equal(hard.values.float()[1:], plain.values.float()[1:])
    assert torch.equal(hard.scales[1:], plain.scales[1:])


def test_a_factor_is_multiplied_in_before_scales_are_made() -> None:
    x, factor = torch.randn(3, 32), torch.rand(32) + 0.5
    folded, expected = quantise_rows_torch(x, factor), quantise_rows_torch(x * factor)
    assert torch.equal(folded.values.float(), expected.values.float())
    assert torch.equal(folded.scales, expected.scales)


def test_groups_and_blocks_have_the_scale_of_their_largest_value() -> None:
    x = torch.randn(2 * BLOCK, 3 * BLOCK)
    by_groups, by_blocks, by_tensor = quantise_rows_torch(x, None, BLOCK), quantise_blocks(x), quantise_tensor(x)
    assert torch.allclose(by_groups.scales * LARGEST, x.abs().view(-1, 3, BLOCK).amax(-1))
    assert torch.allclose(by_blocks.scales * LARGEST, x.abs().view(2, BLOCK, 3, BLOCK).amax((1, 3)))
    assert torch.allclose(by_tensor.scales * LARGEST, x.abs().max())
    for found in (by_groups, by_blocks, by_tensor):
        assert found.values.dtype == FP8
        assert (found.dense() - x).norm() < 0.04 * x.norm()


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_the_product_of_torch_is_that_of_the_reference(scaling: str) -> None:
    candidate = fp8_layer.Candidate(scaling, kept=True)
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    frozen = fp8_layer.Frozen.of(weight, candidate)
    rows = fp8_layer.activations(candidate, x)
    found, why = attempt(lambda: fp8_layer.product(rows, frozen.forward, True))
    if found is None:
        pytest.skip(f"torch {torch.__version__} has no such product on the CPU: {why}")
    assert torch.equal(found, fp8_layer.product_torch(rows, frozen.forward))


def test_a_miniature_run_times_layers_and_parts_and_takes_errors(tmp_path: Path) -> None:
    record = fp8_products.measure({"tiny": TINY}, tokens=(48, 32), rounds=2, device="cpu")
    assert record["complete"]
    kinds = [row["kind"] for row in record["rows"]]
    assert kinds == ["layer"] * 2 + ["errors"] * 3 + ["parts"] * 3  # q, k, v and o are of one shape
    layer = record["rows"][0]
    assert set(layer["sides"]) == {fp8_layer.BF16, *fp8_layer.CANDIDATES}
    assert not any("failed" in side for side in layer["sides"].values())
    weights = 4 * 128 * 128 + 3 * 128 * 256
    assert layer["flops"] == 4 * 48 * weights
    assert layer["sides"]["bf16"]["bytes"] == 2 * weights
    assert layer["sides"]["tensor, transposed per use"]["bytes"] == weights + 7 * 4
    assert layer["sides"]["tensor, both layouts"]["bytes"] == 2 * (weights + 7 * 4)
    errors = record["rows"][2]["errors"]
    assert errors["bf16"]["none"]["forward"]["whole"] < 0.005
    for side in ("row", "tensor", "block"):
        for way in ("forward", "backward"):
            assert 0.005 < errors[side]["none"][way]["whole"] < 0.06
    assert errors["row"]["none"]["backward"]["worst_row"] < errors["tensor"]["none"]["backward"]["worst_row"]
    text = table(record)
    assert text.count("at least 1.35x: ") == 2
    file = tmp_path / "record.json"
    write_json(file, record)
    assert table(json.loads(file.read_text(encoding="utf-8"))) == text


def test_rows_that_the_seconds_do_not_reach_are_open() -> None:
    record = fp8_products.measure({"tiny": TINY}, tokens=(32,), rounds=2, device="cpu", seconds=0)
    assert not record["complete"]
    assert "Seconds ran out" in table(record)


def test_a_model_without_whole_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="tiny-qwen3: dimensions of its projections are no multiples of 128"):
        fp8_products.measure({"tiny-qwen3": MODELS["tiny-qwen3"]}, tokens=(32,), rounds=2, device="cpu")
