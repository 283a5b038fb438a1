"""What stands for stock's functions: equal to a recurrence token by token, document by document, in value and gradient.

Over lengths that begin and end anywhere in a chunk; errors in fp32 are held against those of stock's own functions,
which run each document by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from fastpack_trl.errors import PackingError
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent.reference import by_document, conv_reference, delta_reference, ssd_reference
from fastpack_trl.recurrent.seams import OURS
from fastpack_trl.recurrent.state_scan import chunk_inverse, merged_inverse, scan_states, state_scan

LENGTHS = (
    (1,), (2,), (CHUNK,), (CHUNK, CHUNK), (5, 1, 1, 1, 1, 1), (70, 58), (63, 1, 64, 65, 1), (200, 1, 63, 64, 65, 30),
    (300, 129), (1, 700), (129, 127, 3),
)  # fmt: skip
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 8


class Case(NamedTuple):
    """A function of stock, what it computes, and arguments with as many rows as tokens."""

    stock: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    arguments: Callable[[int], list[Tensor]]


def repeated(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1)


def normalised(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


def delta_exact(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    if query.shape[1] != value.shape[1]:
        query, key = repeated(query), repeated(key)
    return delta_reference(normalised(query) * query.shape[-1] ** -0.5, normalised(key), value, g, beta)


def delta(function: Callable[..., Any], *tokens: Tensor) -> Tensor:
    query, key, value, g, beta = (tensor[None] for tensor in tokens)
    out: Tensor = function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]
    return out


def delta_arguments(tokens: int, *, kimi: bool) -> list[Tensor]:
    key_heads = HEADS if kimi else KEY_HEADS
    # Keys that are alike, and decays from none to all of the state.
    query, key = torch.randn(tokens, key_heads, KEY), torch.randn(tokens, key_heads, KEY) + 1
    decay = -torch.rand(tokens, HEADS, *([KEY] if kimi else [])).pow(8) * 30
    return [query, key, torch.randn(tokens, HEADS, VALUE), decay, torch.rand(tokens, HEADS)]


A = -torch.rand(HEADS, generator=torch.Generator().manual_seed(3)) * 4


def mamba(function: Callable[..., Any], x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    rows = (tensor[None] for tensor in (x, dt))
    heads = A.to(x.dtype)
    skip, bias = heads + 2, heads / 8
    out: Tensor = function(
        *rows, heads, b[None], c[None], chunk_size=32, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=(0.01, 2.0)
    )[0]
    return out


def mamba_exact(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    heads = A.to(x.dtype)
    step = F.softplus(dt + heads / 8).clamp(0.01, 2.0)
    return ssd_reference(x * step[..., None], heads * step, repeated(b), repeated(c)) + (heads + 2)[:, None] * x


def mamba_arguments(tokens: int) -> list[Tensor]:
    shapes = ((HEADS, VALUE), (HEADS,), (KEY_HEADS, KEY), (KEY_HEADS, KEY))
    return [torch.randn(tokens, *shape) for shape in shapes]


WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(4))


def conv(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    weight = WEIGHT.to(x.dtype)
    return function(x.T[None], weight=weight, bias=weight[:, 0], activation="silu")[0].T


def conv_exact(x: Tensor) -> Tensor:
    weight = WEIGHT.to(x.dtype)
    return F.silu(conv_reference(x, weight, weight[:, 0]))


NEXT, KIMI, FALCON = (
    vars(module) for module in (modeling_qwen3_next, modeling_kimi_linear, modeling_falcon_h1)
)  # fmt: skip
CASES = {
    "torch_chunk_gated_delta_rule": Case(NEXT["torch_chunk_gated_delta_rule"], delta, delta_exact,
                                         partial(delta_arguments, kimi=False)),
    "chunk_kimi_delta_attention": Case(KIMI["chunk_kimi_delta_attention"], delta, delta_exact,
                                       partial(delta_arguments, kimi=True)),
    "mamba2_chunk_scan": Case(FALCON["mamba2_chunk_scan"], mamba, mamba_exact, mamba_arguments),
    "causal_conv1d_fn": Case(NEXT["causal_conv1d_fn"], conv, conv_exact, lambda tokens: [torch.randn(tokens, 6)]),
}  # fmt: skip


def results(function: Callable[..., Tensor], arguments: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of each argument."""
    leaves = [argument.to(dtype).requires_grad_() for argument in arguments]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


def distance(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-12))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_packed_equals_separate_documents_token_by_token(name: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    arguments = case.arguments(sum(lengths))
    ours = partial(case.ours, partial(OURS[name], chunks_of(PackedBatch.from_lengths(lengths))))
    exact = results(partial(by_document, case.reference, lengths), arguments, torch.float64)
    in_double = results(ours, arguments, torch.float64)
    assert max(map(distance, in_double, exact)) <= 1e-11

    def separately(*tokens: Tensor) -> Tensor:
        if name == "torch_chunk_gated_delta_rule":  # transformers 5.17 repeats the heads of the key in the layer
            tokens = (*map(repeated, tokens[:2]), *tokens[2:])
        return by_document(partial(case.ours, case.stock), lengths, *tokens)

    stock = results(separately, arguments, torch.float32)
    for own, theirs, right in zip(results(ours, arguments, torch.float32), stock, exact, strict=True):
        assert distance(own, right) <= 2 * distance(theirs, right) + 3e-7


@pytest.mark.parametrize("name", CASES)
def test_no_document_depends_on_another_not_even_by_rounding(name: str) -> None:
    torch.manual_seed(0)
    case, lengths = CASES[name], (70, 1, 200, 58, 64)
    ours = partial(case.ours, partial(OURS[name], chunks_of(PackedBatch.from_lengths(lengths))))
    leaves = [argument.requires_grad_() for argument in case.arguments(sum(lengths))]
    outs = ours(*leaves).split(lengths)
    for target, out in enumerate(outs):
        for gradient in torch.autograd.grad(out.sum(), leaves, retain_graph=True):
            for source, part in enumerate(gradient.split(lengths)):
                assert target == source or not part.any(), f"{target} depends on {source}"


def test_a_state_across_documents_that_decays_by_a_hundred_orders_stays_finite() -> None:
    """Differences of sums across documents are large and positive: masked after `exp`, they would be NaN."""
    lengths = (40, 50, 38)
    query, key, value, g, beta = delta_arguments(sum(lengths), kimi=False)
    g[:40] = -20.0
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, g, beta)]
    out = delta(partial(OURS["torch_chunk_gated_delta_rule"], chunks_of(PackedBatch.from_lengths(lengths))), *leaves)
    assert all(bool(torch.isfinite(x).all()) for x in (out, *torch.autograd.grad(out.sum(), leaves)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("longest", [1, 3, 5])
def test_doubling_is_the_loop(longest: int, reverse: bool) -> None:
    """Over documents that enter `longest` chunks, in seven chunks."""
    torch.manual_seed(0)
    decay, added = torch.randn(7, 2, 6, 6, dtype=torch.float64) / 3, torch.randn(7, 2, 6, 4, dtype=torch.float64)
    decay[[5 - longest + 1, 6] if reverse else [0, longest]] = 0.0
    if longest == 1:
        decay[:] = 0.0
    levels = max(1, (longest - 1).bit_length())
    loop = state_scan(decay, added, 7, reverse, True)
    torch.testing.assert_close(state_scan(decay, added, levels, reverse, False), loop)
    torch.library.opcheck(torch.ops.fastpack.state_scan.default, (decay, added, levels, reverse, False))


@pytest.mark.parametrize("loop", [False, True])
def test_gradients_of_the_scan_and_of_the_inverse(loop: bool) -> None:
    torch.manual_seed(0)
    decay, added = (torch.randn(5, 2, 3, n, dtype=torch.float64, requires_grad=True) for n in (3, 2))
    assert torch.autograd.gradcheck(lambda a, b: scan_states(a, b, 3, loop), (decay, added))
    lower = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    inverse = torch.ops.fastpack.chunk_inverse_with_gradient.default
    assert torch.autograd.gradcheck(lambda x: inverse(x.tril(-1)), (lower,))


@pytest.mark.parametrize("size", [8, 16, 64])
def test_merged_blocks_invert_keys_that_are_all_alike(size: int) -> None:
    """The product of powers over a whole chunk is off by eight orders there."""
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(3, 2, size, 16) * 0.1 + 1, dim=-1)
    lower = (keys @ keys.mT).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower.double())
    solver = distance(chunk_inverse(lower), exact)
    assert distance(merged_inverse(lower), exact) <= 10 * solver + 1e-6
    assert not merged_inverse(lower).triu(1).any()


def test_a_state_or_another_row_is_refused_by_name() -> None:
    chunks = chunks_of(PackedBatch.from_lengths((3, 2)))
    arguments = [tensor[None] for tensor in delta_arguments(5, kimi=False)]
    rule = partial(OURS["torch_chunk_gated_delta_rule"], chunks)
    with pytest.raises(PackingError, match=r"and a state.*use_cache=False"):
        rule(*arguments, output_final_state=True)
    with pytest.raises(PackingError, match=r"1 row\(s\) of 4 tokens"):
        rule(*(tensor[:, :4] for tensor in arguments))


def test_the_inverse_has_the_strides_of_its_fake_kernel() -> None:
    """A compiled layer is generated for them, and stops at others."""
    lower = torch.randn(3, 2, 64, 64, generator=torch.Generator().manual_seed(0)).tril(-1) * 0.1
    torch.library.opcheck(torch.ops.fastpack.chunk_inverse.default, (lower,), test_utils="test_faketensor")
    assert torch.ops.fastpack.chunk_inverse(lower).stride() == lower.stride()
