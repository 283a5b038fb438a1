"""FP8 matrices: which values are quantized and their error; the product of two equals that of their dense values."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from lora_material import KINDS, matrix

from fastpack_trl.kernels import fp8
from fastpack_trl.kernels.fp8 import quantize_rows, quantize_rows_torch, scaled_product, scaled_product_torch

values = st.floats(-(2.0**100), 2.0**100, width=32) | st.just(float("nan"))


@settings(deadline=None, max_examples=200)
@given(arrays("float32", st.tuples(st.integers(1, 4), st.just(16)), elements=values))
def test_a_value_is_off_by_a_sixteenth_or_by_the_smallest_step_of_its_row(x: object) -> None:
    rows = torch.from_numpy(x)
    found = quantize_rows_torch(rows)
    assert (found.scales > 0).all()
    assert torch.equal(found.values.isnan(), rows.isnan())
    largest = rows.nan_to_num().abs().amax(1, keepdim=True)
    # Half a step: of 3 bits of mantissa, or of the smallest value, 2**-9, times the scale.
    allowed = torch.maximum(rows.abs() / 16, largest.clamp(min=fp8.LEAST) / fp8.LARGEST * 2**-10) * (1 + 1e-5)
    assert ((found.dense() - rows).abs() <= allowed)[~rows.isnan()].all()
    assert (found.values.float()[rows == 0] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_changes_no_other_row_and_stays_non_finite(kind: str) -> None:
    hard, plain = (quantize_rows_torch(matrix(each, (3, 32), torch.float32)) for each in (kind, "plain"))
    assert torch.equal(hard.values.float()[1:], plain.values.float()[1:])
    assert torch.equal(hard.scales[1:], plain.scales[1:])
    weight, x = quantize_rows(torch.randn(16, 32)), matrix(kind, (3, 32), torch.bfloat16)
    out = scaled_product(quantize_rows(x), weight, torch.float32)
    assert bool(out[0].isnan().all()) == (kind in ("nan", "infinite"))
    assert out[1:].isfinite().all()


def test_a_product_is_as_far_from_the_true_one_as_its_rounded_values() -> None:
    """torch's own product on the CPU, if it has one, rounds the same sums; a factor is part of the matrix."""
    x, weight, factor = torch.randn(3, 32).bfloat16(), torch.randn(48, 32).bfloat16(), torch.rand(32) + 0.5
    a, b = quantize_rows(x), quantize_rows(weight)
    true = x.double() @ weight.double().t()
    rounded = a.dense().double() @ b.dense().double().t()
    product = scaled_product(a, b, torch.float32).double()
    assert (product - rounded).norm() < 1e-6 * true.norm()
    assert 0.005 < (product - true).norm() / true.norm() < 0.06
    assert scaled_product(quantize_rows(x[:0]), b, torch.float32).shape == (0, 48)
    assert not fp8.failure_of_products(x.device, torch.float32)
    folded, expected = quantize_rows_torch(x, factor), quantize_rows_torch(x * factor)
    assert torch.equal(folded.dense(), expected.dense())
    more = {"scale_a": a.scales, "scale_b": b.scales.t(), "out_dtype": torch.bfloat16}
    with contextlib.suppress(RuntimeError, NotImplementedError):
        of_torch = torch._scaled_mm(a.values, b.values.t(), **more)
        of_ours = scaled_product_torch(a, b, torch.bfloat16)
        assert (of_torch - of_ours).count_nonzero() <= of_ours.numel() // 20, "sums in another order"
        torch.testing.assert_close(of_torch, of_ours, rtol=2**-7, atol=1e-5)
