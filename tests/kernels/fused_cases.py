"""The kernels of fused layers vs. their torch twins and float64: run by `test_triton.py`, interpreted or on CUDA.

Alone: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/fused_cases.py -k norm``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastpack_trl.kernels import gated as gated_module
from fastpack_trl.kernels import norm as norm_module
from fastpack_trl.kernels import rotary as rotary_module
from fastpack_trl.kernels.fused_form import GatedForm, NormForm, RotaryForm
from fastpack_trl.kernels.gated import gated
from fastpack_trl.kernels.norm import add_norm, norm
from fastpack_trl.kernels.rotary import rotary

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
# Interpreted, widths of one block are alike; compiled, those that 16 divides are loaded otherwise.
WIDTHS = pytest.mark.parametrize("width", [80, 100, 2880] if DEVICE == "cuda" else [100, 360])
RUNS = (norm_module, rotary_module, gated_module)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def results(function: Callable[..., Any], tensors: list[Tensor | None], frozen: tuple[int, ...] = ()) -> list[Any]:
    """Return the outputs and the gradients of the tensors that are not frozen."""
    leaves = [None if t is None else t.detach().requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    outs = function(*leaves)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
    grads = torch.autograd.grad(outs, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad], upstream)
    return [*(out.detach() for out in outs), *grads]


def compare(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], tensors: list[Tensor | None], eps: float,
    frozen: tuple[int, ...] = (),
) -> list[Any]:  # fmt: skip
    """Check that kernels are as near to float64 as their twins, twice bit-equal, in the same layouts; return theirs."""
    exact = results(function, [None if t is None else t.double() for t in tensors], frozen)

    def run(kernels: bool) -> list[Any]:
        with monkeypatch.context() as patched:
            for module in RUNS if DEVICE == "cpu" or not kernels else ():
                patched.setattr(module, "runs_triton", lambda *given: kernels)
            return results(function, tensors, frozen)

    mine, twins = run(kernels=True), run(kernels=False)
    # The interpreter runs one program after the other: only what was never written differs, in any dtype alike.
    again = run(kernels=True) if DEVICE == "cuda" or tensors[0].dtype == torch.float32 else mine
    outputs = len(mine) - sum(t is not None for t in tensors) + len(frozen)
    for index, (ours, repeat, twin, wide) in enumerate(zip(mine, again, twins, exact, strict=True)):
        assert torch.equal(ours, repeat)
        assert (ours.dtype, ours.shape) == (twin.dtype, twin.shape)
        assert index >= outputs or ours.stride() == twin.stride()
        assert error(ours, wide) <= 2 * error(twin, wide) + eps
    return mine


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


NORMS = [
    NormForm(1e-6, rounds=True, promotes=True),
    NormForm(1e-6, offset=1),
    NormForm(1e-5, centers=True),
]


@pytest.mark.parametrize("form", NORMS, ids=["llama", "gemma", "layernorm"])
@WIDTHS
@DTYPES
def test_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, form: NormForm) -> None:
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    wide = draw(2, 5, width + 16, dtype=dtype)
    strided = wide[..., :width].transpose(0, 1)  # rows with gaps, in another order
    contiguous, other = draw(3, 7, width, dtype=dtype, scale=100.0), draw(3, 7, width, dtype=dtype)
    params = draw(width, dtype=torch.float32), draw(width, dtype=torch.float32) if form.centers else None
    low = [None if p is None else p.to(dtype) for p in params]
    for x, weights in ((contiguous, [None, None]), (contiguous, low), (strided, list(params))):
        compare(monkeypatch, lambda x, w, b: norm(x, w, b, form), [x, *weights], eps)
    compare(monkeypatch, lambda x, y, w, b: add_norm(x, y, w, b, form), [contiguous, other, *low], eps)
    frozen = compare(monkeypatch, lambda x, w, b: norm(x, w, b, form), [contiguous, *low], eps, (1, 2))
    assert len(frozen) == 2
    assert norm(contiguous[:0], low[0], low[1], form).shape == (0, 7, width)


@DTYPES
def test_layer_norm_as_cudas_autocast_has_it(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, form = draw(3, 7, 100, dtype=dtype, scale=100.0), NormForm(1e-5, centers=True, widens=True)
    params = [draw(100, dtype=dtype) for _ in range(2)]
    out = compare(monkeypatch, lambda x, w, b: norm(x, w, b, form), [x, *params], torch.finfo(dtype).eps)[0]
    stock = nn.functional.layer_norm(x.float(), (100,), *map(Tensor.float, params), 1e-5)
    torch.testing.assert_close(out, stock, rtol=1e-4, atol=1e-4)


ROTARIES = [
    RotaryForm(),
    RotaryForm("pairs", "pairs", "pairs", promotes=True),
    RotaryForm("pairs", "half", "first"),
    RotaryForm(columns="first", narrow=True, dense=True),
]


@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("form", ROTARIES, ids=["half", "pairs", "deepseek", "narrow"])
@pytest.mark.parametrize("dims", [(80, 80), (112, 40)], ids=str)
@DTYPES
def test_rotary(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dims: tuple[int, int], form: RotaryForm, with_norm: bool
) -> None:
    torch.manual_seed(0)
    width, turned = dims
    both = draw(2, 5, 3, width, dtype=dtype)
    q, k = both.transpose(1, 2), both[:, :, :2].transpose(1, 2)  # the heads of k have gaps between tokens
    cos, sin = draw(2, 1, 5, turned // 2 if form.narrow else turned, dtype=torch.float32 if form.promotes else dtype)
    weights: list[Tensor | None] = [None, None]
    if with_norm:
        weights = [draw(width, dtype=dtype), draw(width, dtype=dtype)]
    rms = NormForm(1e-6, rounds=True) if with_norm else None

    def turn(q: Tensor, k: Tensor, *weights: Any) -> Any:
        angles = (cos.double(), sin.double()) if q.dtype == torch.float64 else (cos, sin)
        return rotary(q, k, *angles, form, rms, *weights)

    eps = torch.finfo(dtype).eps
    q_out, _k_out, grad_q, *_ = compare(monkeypatch, turn, [q, k, *weights], eps)
    assert grad_q.stride() == q.stride()
    assert q_out.is_contiguous() == form.dense
    if with_norm:
        assert len(compare(monkeypatch, turn, [q, k, *weights], eps, (2, 3))) == 4


def test_sums_are_exact_in_any_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_module, "runs_triton", lambda *given: True)
    exact = partial(draw, dtype=torch.float32)
    q, k, weight = exact(2, 300, 3, 16), exact(2, 300, 2, 16), exact(16)
    cos, sin = exact(2, 1, 300, 16)

    def gradient() -> Tensor:
        leaf = weight.clone().requires_grad_()
        out = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, RotaryForm(), NormForm(1e-6), leaf, leaf)
        return torch.autograd.grad(out[0].square().sum() + out[1].square().sum(), leaf)[0]

    expected = gradient()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(gradient(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


GATES = [
    GatedForm("silu"), GatedForm("silu", alpha=1.702), GatedForm("gelu_tanh"), GatedForm("gelu"), GatedForm("relu"),
    GatedForm("relu2", up_first=True),
]  # fmt: skip


@pytest.mark.parametrize("form", GATES, ids=str)
@pytest.mark.parametrize("width", [100, 600])
@DTYPES
def test_gated(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, form: GatedForm) -> None:
    torch.manual_seed(0)
    eps = 2 * torch.finfo(dtype).eps  # exponentials differ by two units
    gate, up, both = (draw(2, 3, n, dtype=dtype, scale=3.0) for n in (width, width, 2 * width))
    compare(monkeypatch, lambda g, u: gated(g, u, form), [gate, up.transpose(0, 1).contiguous().transpose(0, 1)], eps)
    compare(monkeypatch, lambda h: gated(h, None, form), [both], eps)
