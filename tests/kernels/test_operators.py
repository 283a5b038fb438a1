"""Operators of compiled layers: checked by torch itself, and nothing but their kernels runs in a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from lora_material import reference_projection
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.varlen_common import RowLayer
from fastpack_trl.lora.base_weight import BaseWeight, from_4bit
from fastpack_trl.lora.projection import lora_projection

TOKENS, WIDTH, OUT, RANK = 6, 64, 32, 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def four_bit() -> BaseWeight:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear4bit(WIDTH, OUT, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(OUT, WIDTH)})
    return from_4bit(layer.to("cpu").weight)


def any_base(kind: str) -> BaseWeight:
    return BaseWeight(torch.randn(OUT, WIDTH)) if kind == "dense" else four_bit()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def attend(query: Tensor, cu_seqlens: Tensor) -> Tensor:
    layer = RowLayer("varlen", cu_seqlens, 4, cu_seqlens, 4)
    split = query.view(1, TOKENS, 4, WIDTH // 4).transpose(1, 2)
    return layer.attend(AttentionCall(split, split, split, 0.25)).reshape(TOKENS, WIDTH)


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_the_operators_pass_torchs_own_checks(kind: str) -> None:
    torch.manual_seed(0)
    base, ops = any_base(kind), torch.ops.fastpack
    rows, a, b, grad = (draw(*shape) for shape in ((TOKENS, WIDTH), (RANK, WIDTH), (OUT, RANK), (TOKENS, OUT)))
    if kind == "dense":
        for source, bias in ((None, None), (draw(TOKENS, WIDTH), draw(OUT))):
            # Its gradient is that of `reduced` too, which is made outside: no numerical derivative of it alone.
            reduced = (rows if source is None else source).detach().mm(a.detach().t())
            torch.library.opcheck(ops.lora_projection.default, (rows, source, reduced, a, b, bias, *base))
    suffix, of_base = ("", (base.weight,)) if kind == "dense" else ("_4bit", tuple(base))
    rows, a, b, grad = (tensor.detach() for tensor in (rows, a, b, grad))
    for name, arguments in (
        ("lora_product", (rows, rows.mm(a.t()), b, None)),
        ("lora_grad_input", (grad, grad.mm(b), a)),
        ("lora_grad_input", (grad, None, None)),
    ):
        torch.library.opcheck(getattr(ops, name + suffix).default, (*arguments, *of_base))


class Targets:
    """A backend that runs graphs as they are and remembers what they call."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, module: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.names += [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        return make_boxed_func(module.forward)

    @property
    def own(self) -> list[str]:
        return [name.split(".")[1] for name in self.names if name.startswith("fastpack.")]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_a_compiled_graph_calls_operators_without_an_autograd_wrapper(kind: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    base, cu_seqlens = any_base(kind), torch.tensor([0, 4, 6], dtype=torch.int32)
    leaves = [draw(TOKENS, WIDTH), draw(RANK, WIDTH), draw(OUT, RANK)]

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_projection(attend(x.sin(), cu_seqlens).sin(), base, a, b).cos()

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return checkpoint(layer, x, a, b, use_reentrant=False) if checkpointing else layer(x, a, b)

    expected = reference_projection(attend(leaves[0].sin(), cu_seqlens).sin(), base, *leaves[1:]).cos()
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    seen = Targets()
    actual = torch.compile(run, backend=seen.backend, fullgraph=True)(*leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), leaves), wanted, rtol=1e-5, atol=1e-4)
    product = "lora_product" if kind == "dense" else "lora_product_4bit"
    backward = product.replace("product", "grad_input")
    assert set(seen.own) == {"varlen_attention", "varlen_attention_backward", product, backward}
    # Computed again in a checkpoint, and not kept.
    assert seen.own.count("varlen_attention") == 1 + checkpointing
    for name in seen.own:
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastpack::{name}", key), (name, key)


def test_an_operator_under_inference_mode_gives_what_it_gives_otherwise() -> None:
    torch.manual_seed(0)
    base, cu_seqlens = any_base("dense"), torch.tensor([0, 4, 6], dtype=torch.int32)
    x, a, b = (draw(*shape).detach() for shape in ((TOKENS, WIDTH), (RANK, WIDTH), (OUT, RANK)))

    def whole() -> Tensor:
        rows = attend(x, cu_seqlens)
        return torch.ops.fastpack.lora_projection(rows, None, rows.mm(a.t()), a, b, None, *base)

    expected = whole()
    with torch.inference_mode():
        assert torch.equal(whole(), expected)


@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_flops_of_the_operators_are_those_of_their_products(kind: str) -> None:
    """Also on fake tensors, as a partitioner asks for them."""
    torch.manual_seed(0)
    base, x, a, b = any_base(kind), draw(TOKENS, WIDTH), draw(RANK, WIDTH), draw(OUT, RANK)
    with FlopCounterMode(display=False) as counted:
        torch.ops.fastpack.lora_projection(x, None, x.detach().mm(a.detach().t()), a, b, None, *base).sum().backward()
    with FlopCounterMode(display=False) as expected:
        reference_projection(x, base, a, b).sum().backward()
    assert counted.get_total_flops() == expected.get_total_flops() > 0
    fake = torch._subclasses.FakeTensorMode()
    shapes = [fake.from_tensor(tensor.detach()) for tensor in (x, x @ a.t(), b)]
    with fake, FlopCounterMode(display=False) as counter:
        torch.ops.fastpack.lora_product(*shapes, None, fake.from_tensor(torch.empty(OUT, WIDTH)))
    assert counter.get_total_flops() == 2 * TOKENS * OUT * (WIDTH + RANK)
