"""A LoRA projection over a base in FP8: eager and in a graph it is the reference, and as far from the truth as that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lora_material import compiled_projection
from torch import Tensor

from fastpack_trl.kernels.fp8 import quantize_rows_torch
from fastpack_trl.lora.base_weight import Fp8Weight
from fastpack_trl.lora.projection import lora_projection

IN, OUT, RANK = 48, 32, 4


class _BaseProduct(torch.autograd.Function):
    """``x W^T``, its factors rounded to FP8 in both directions, multiplied in the dtype of x: the reference."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Fp8Weight) -> Tensor:
        ctx.base = base
        return quantize_rows_torch(x).dense().to(x.dtype) @ base.dense(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rounded = quantize_rows_torch(grad, ctx.base.scales.view(-1)).dense().to(grad.dtype)
        return rounded @ ctx.base.weight.to(grad.dtype), None


def reference(x: Tensor, base: Fp8Weight, a: Tensor, b: Tensor, bias: Tensor | None, dropped: Tensor | None) -> Tensor:
    out: Tensor = _BaseProduct.apply(x, base) + F.linear(F.linear(x if dropped is None else dropped, a), b)
    return out if bias is None else out + bias


def leaves(seed: int = 0, tokens: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (tokens, IN), "a": (RANK, IN), "b": (OUT, RANK), "bias": (OUT,), "weight": (OUT, IN)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def results(project: Callable[..., Tensor], *, bias: bool, dropped: bool, seed: int = 0) -> dict[str, Tensor]:
    """Output and gradients."""
    given = leaves(seed)
    base = Fp8Weight.of(given.pop("weight"))
    read = {name: tensor.requires_grad_() for name, tensor in given.items()}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = F.dropout(read["x"], 0.5) if dropped else None
    out = project(read["x"], base, read["a"], read["b"], read["bias"] if bias else None, other)
    out.sin().sum().backward()
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in read.items() if leaf.grad is not None}


@pytest.mark.parametrize("project", [lora_projection, compiled_projection])
@pytest.mark.parametrize(("bias", "dropped"), [(False, False), (True, False), (True, True)])
def test_projection_and_gradients_equal_reference(project: Callable[..., Tensor], bias: bool, dropped: bool) -> None:
    options = {"bias": bias, "dropped": dropped}
    found, expected = results(project, **options), results(reference, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_output_and_input_gradient_are_off_by_their_rounding_and_adapters_gradients_are_not(seed: int) -> None:
    found = results(lora_projection, bias=True, dropped=False, seed=seed)
    given = {name: tensor.double().requires_grad_() for name, tensor in leaves(seed).items()}
    out = F.linear(given["x"], given["weight"], given["bias"]) + F.linear(F.linear(given["x"], given["a"]), given["b"])
    # The true derivative at the output that ours had: what is wrong in it is then ours alone.
    out.backward(found["out"].double().cos())
    for name, true in (("out", out.detach()), ("x", given["x"].grad)):
        assert 0.003 < (found[name] - true).norm() / true.norm() < 0.05
    for name in ("a", "b", "bias"):
        true = given[name].grad
        assert (found[name] - true).norm() / true.norm() < 1e-5
