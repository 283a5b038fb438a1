"""Operators of compiled layers: checked by torch itself, and nothing but their kernels runs in a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from lora_material import quantized_linear, reference_projection
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.row_backend import RowLayer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.lora.base_weight import BaseWeight, from_4bit
from fastpack_trl.lora.projection import lora_projection

TOKENS, WIDTH, OUT, RANK = 6, 64, 32, 4
KINDS = pytest.mark.parametrize("kind", ["dense", "nf4"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def any_base(kind: str) -> BaseWeight:
    linear = nn.Linear(WIDTH, OUT, bias=False)
    return BaseWeight(linear.weight.detach()) if kind == "dense" else from_4bit(quantized_linear(linear, kind).weight)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


def attend(query: Tensor) -> Tensor:
    ends = torch.tensor([0, 4, 6], dtype=torch.int32)
    layer = RowLayer(Varlen(), ends, 4, ends, 4)
    split = query.view(1, TOKENS, 4, WIDTH // 4).transpose(1, 2)
    return layer.attend(AttentionCall(split, split, split, 0.25)).reshape(TOKENS, WIDTH)


@KINDS
def test_operators_pass_torchs_checks_and_count_the_flops_of_their_matmuls(kind: str) -> None:
    """Also on fake tensors, as a partitioner asks for them, and the same bits in inference mode."""
    base, ops = any_base(kind), torch.ops.fastpack
    rows, grad = draw((TOKENS, WIDTH), (TOKENS, OUT))
    stored, of_base = ("dense", (base.weight,)) if kind == "dense" else ("4bit", tuple(base))
    project = getattr(ops, f"lora_base_{stored}")
    if kind == "dense":
        torch.library.opcheck(project.default, (rows, *of_base))
    with FlopCounterMode(display=False) as counted:
        (out := project(rows, *of_base)).sum().backward()
    assert counted.get_total_flops() == 2 * 2 * TOKENS * OUT * WIDTH
    attended = attend(rows)
    with torch.inference_mode():
        assert torch.equal(project(rows, *of_base), out)
        assert torch.equal(attend(rows), attended)
    for name, tensor in (("lora_product", rows), ("lora_grad_input", grad)):
        torch.library.opcheck(getattr(ops, f"{name}_{stored}").default, (tensor.detach(), *of_base))
    fake = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FlopCounterMode(display=False) as counter:
        ops.lora_product_dense(rows.detach(), torch.empty(OUT, WIDTH))
    assert counter.get_total_flops() == 2 * TOKENS * OUT * WIDTH


@pytest.mark.parametrize("checkpointing", [False, True])
@KINDS
def test_a_compiled_graph_calls_operators_without_an_autograd_wrapper(kind: str, checkpointing: bool) -> None:
    base, leaves, called = any_base(kind), draw((TOKENS, WIDTH), (RANK, WIDTH), (OUT, RANK)), list[str]()

    def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
        called.extend(name.split(".")[1] for name in targets if name.startswith("fastpack."))
        return make_boxed_func(module.forward)

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_projection(attend(x.sin()).sin(), base, a, b).cos()

    def run(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, use_reentrant=False) if checkpointing else layer(*tensors)

    expected = reference_projection(attend(leaves[0].sin()).sin(), base, *leaves[1:]).cos()
    actual = torch.compile(run, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (actual, expected))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)
    product = f"lora_product_{'dense' if kind == 'dense' else '4bit'}"
    backward = product.replace("product", "grad_input")
    assert set(called) == {"varlen_attention", "varlen_attention_backward", product, backward}
    # Computed again in a checkpoint, and not kept.
    assert called.count("varlen_attention") == 1 + checkpointing
    for name in called:
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastpack::{name}", key), (name, key)
