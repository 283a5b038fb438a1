"""The operators of `per_document` and of `varlen`, of which the latter runs its twin on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_material import (
    HEAD_DIM,
    SCALE,
    assert_as_near_as_dense,
    attend,
    check_operators,
    make_inputs,
    prepared,
    run,
)  # fmt: skip
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.reference import NO_SOFTCAP, band_mask, document_attention
from fastpack_trl.attention.varlen_common import RowLayer, fold_sinks, sink_gradient
from fastpack_trl.packing.packed_batch import PackedBatch

LENGTHS = (1, 7, 20, 2)
FORMS = [(dtype, softcap) for dtype in (torch.float64, torch.float32, torch.bfloat16) for softcap in (None, 2.0)]


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 4, 12], ids=["v=qk", "v<qk", "v>qk"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4], ids=["", "window"])
@pytest.mark.parametrize(
    ("name", "device", "dtype", "softcap"),
    [
        *(("per_document", "cpu", dtype, softcap) for dtype, softcap in FORMS),
        *(("varlen", "cpu", dtype, None) for dtype in (torch.float64, torch.bfloat16)),
        *(("flash_attention_4", "cpu", dtype, softcap) for dtype, softcap in FORMS if dtype != torch.float32),
        pytest.param("varlen", "cuda", torch.bfloat16, None, marks=pytest.mark.cuda),
    ],
)
def test_forward_and_gradients_within_twice_the_error_of_dense_attention(
    name: str, device: str, dtype: torch.dtype, softcap: float | None, window: int | None, sinks: bool, value_dim: int
) -> None:
    batch = PackedBatch.from_lengths(LENGTHS, num_padding=3)
    ours = attend(prepared(name, batch, 4, device=device), window, softcap, device)
    # Stock's float64 is the oracle itself, without error: what is left there are a few units in the last place.
    floor = torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 1)
    assert_as_near_as_dense(batch, ours, window, softcap, dtype=dtype, floor=floor, sinks=sinks, value_dim=value_dim)


def test_operators_pass_torchs_own_checks() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    query, key, value, sinks = make_inputs(batch, torch.float64, sinks=True)
    tokens = [tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in (query, key, value)]
    ends = batch.cu_seqlens
    for name in ("varlen_attention", "flash4_attention"):
        for sink, window in ((sinks, 2), (None, 0)):
            check_operators(name, (*tokens, ends, sink, window, SCALE, 3, ends, 3, NO_SOFTCAP))


@pytest.mark.parametrize("name", ["per_document", "varlen"])
def test_a_flop_counter_changes_no_bit(name: str) -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    inputs, ours = make_inputs(batch, torch.float32, sinks=True), attend(prepared(name, batch, 4), window=4)
    eager = run(ours, inputs)
    with FlopCounterMode(display=False):
        observed = run(ours, inputs)
    for one, other in zip(eager, observed, strict=True):
        assert torch.equal(one, other)


def test_sinks_on_a_kernel_without_them_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks, mask = torch.randn(2, dtype=torch.float64, requires_grad=True), band_mask(7, 4)
    expected, lse = document_attention(query, key, value, mask, SCALE, sinks)
    upstream = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, sinks, upstream)
    plain = [one[0] for one in document_attention(query, key, value, mask, SCALE)]
    out, folded = fold_sinks(plain[0].detach().transpose(0, 1).clone(), plain[1].detach(), sinks.detach())
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(folded, lse[0])
    found = sink_gradient(upstream[0].transpose(0, 1), out, folded, sinks.detach())
    torch.testing.assert_close(found, gradient)


def test_varlen_traces_without_a_graph_break_and_without_lengths_in_the_graph() -> None:
    graphs = []

    def backend(module: Any, _example: Any) -> Any:
        graphs.append(module)
        return module.forward

    def eager(query: Tensor, key: Tensor, value: Tensor, *metadata: Any) -> Tensor:
        out: Tensor = RowLayer("varlen", *metadata, *metadata).attend(AttentionCall(query, key, value, SCALE))
        return out

    compiled = torch.compile(eager, backend=backend, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for documents in torch.randint(2, 9, (50,), generator=generator).tolist():
        batch = PackedBatch.from_lengths(torch.randint(2, 30, (documents,), generator=generator).tolist())
        arguments = [tensor.detach() for tensor in make_inputs(batch, torch.float32)]
        arguments += [batch.cu_seqlens, batch.bucketed_max_seqlen]
        torch.testing.assert_close(compiled(*arguments), eager(*arguments))
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("per_document", {"dropout": 0.1}, r"attention dropout is 0\.1.*packed_attention='sdpa'"),
        ("varlen", {"dropout": 0.1}, r"varlen has no dropout.*set packed_attention='per_document'"),
        ("varlen", {"softcap": 30.0}, r"varlen has no softcap.*set packed_attention='per_document'"),
    ],
)
def test_what_a_kernel_lacks_is_named(name: str, asked: dict[str, float], message: str) -> None:
    batch = PackedBatch.from_lengths((3, 2))
    with pytest.raises(ValueError, match=message):
        prepared(name, batch).attend(AttentionCall(*make_inputs(batch, torch.float32), SCALE, **asked))
