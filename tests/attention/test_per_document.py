"""The per-document operator against float64, feature by feature, with stock's own error as the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_material import HEAD_DIM, HEADS, SCALE, dense_attention, errors, make_inputs, prepared, run
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.attention import per_document
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.reference import (
    NO_SOFTCAP,
    NO_WINDOW,
    DocumentInputs,
    reference_backward,
    reference_forward,
)
from fastpack_trl.packing.packed_batch import PackedBatch

LENGTHS = (1, 7, 20, 2)


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 4, 12], ids=["v=qk", "v<qk", "v>qk"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4], ids=["", "window"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_and_gradients_within_twice_the_error_of_dense_attention(
    dtype: torch.dtype, window: int | None, sinks: bool, softcap: float | None, value_dim: int
) -> None:
    batch = PackedBatch.from_lengths(LENGTHS, num_padding=3)
    layer = prepared("per_document", batch, 4)

    def ours(tensors: list[Tensor]) -> Tensor:
        return layer.attend(
            AttentionCall(*tensors[:3], SCALE, window, sinks=tensors[3] if sinks else None, softcap=softcap)
        )

    def dense(tensors: list[Tensor]) -> Tensor:
        return dense_attention(batch, tensors, window, softcap)

    actual, budget = [], []
    for seed in range(4):  # the gradient of the sinks has four numbers: one draw says little about its error
        inputs = make_inputs(batch, dtype, sinks=sinks, value_dim=value_dim, seed=seed)
        exact = run(dense, [tensor.detach().double().requires_grad_() for tensor in inputs])
        actual.append(errors(run(ours, inputs), exact))
        budget.append(errors(run(dense, inputs), exact))
    # Stock's float64 is the oracle itself, without error: what is left there are a few units in the last place.
    floor = torch.finfo(dtype).eps * (8 if dtype == torch.float64 else 1)
    mean_error, mean_budget = (torch.stack(rows).square().mean(0).sqrt() for rows in (actual, budget))
    assert (mean_error <= 2 * mean_budget + floor).all(), (mean_error, mean_budget)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [NO_WINDOW, 4], ids=["", "window"])
def test_kernel_and_reference_are_the_same_operator(window: int, sinks: bool) -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    query, key, value, *sink = (tensor.detach() for tensor in make_inputs(batch, torch.float64, sinks=sinks))
    layer = prepared("per_document", batch, 4)
    band = layer.bands.get(window)
    inputs = DocumentInputs(
        query, key, value, layer.cu_seqlens, sink[0] if sinks else None, band, window, SCALE, NO_SOFTCAP, 20
    )
    out, lse = per_document._flash_forward(inputs)
    expected_out, expected_lse = reference_forward(inputs)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    upstream = torch.randn_like(out)
    backward = (inputs, upstream, out, lse)
    for actual, expected in zip(per_document._flash_backward(*backward), reference_backward(*backward), strict=True):
        torch.testing.assert_close(actual, expected)


def test_no_document_sees_another() -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    inputs = make_inputs(batch, torch.float32, sinks=True)
    layer = prepared("per_document", batch)
    out = layer.attend(AttentionCall(*inputs[:3], SCALE, sinks=inputs[3]))
    for document, part in enumerate(out[0].split(LENGTHS)):
        for gradient in torch.autograd.grad(part.sum(), inputs[:3], retain_graph=True):
            touched = [bool(piece.any()) for piece in gradient.split(LENGTHS, dim=2)]
            assert (
                touched == [index == document and length > 0 for index, length in enumerate(LENGTHS)]
                or (
                    LENGTHS[document] == 1  # a softmax over one key passes no gradient to query and key
                    and not any(touched[:document] + touched[document + 1 :])
                )
            )


def test_operator_passes_torchs_own_checks() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    inputs = make_inputs(batch, torch.float64, sinks=True)
    layer = prepared("per_document", batch)
    arguments = (*inputs[:3], layer.cu_seqlens, inputs[3], None, NO_WINDOW, SCALE, NO_SOFTCAP, 3)
    torch.library.opcheck(torch.ops.fastpack.per_document_attention_with_gradient.default, arguments)
    inner = [value.detach() if isinstance(value, Tensor) else value for value in arguments]
    torch.library.opcheck(torch.ops.fastpack.per_document_attention.default, inner)
    out, lse = torch.ops.fastpack.per_document_attention(*inner)
    torch.library.opcheck(
        torch.ops.fastpack.per_document_attention_backward.default, (torch.ones_like(out), out, lse, *inner)
    )


def test_a_flop_counter_changes_no_bit() -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    inputs = make_inputs(batch, torch.float32, sinks=True)
    layer = prepared("per_document", batch, 4)

    def attend(tensors: list[Tensor]) -> Tensor:
        return layer.attend(AttentionCall(*tensors[:3], SCALE, window=4, sinks=tensors[3]))

    eager = run(attend, inputs)
    with FlopCounterMode(display=False):
        observed = run(attend, inputs)
    for ours, operator in zip(eager, observed, strict=True):
        assert torch.equal(ours, operator)


def test_traces_without_a_graph_break_and_without_lengths_in_the_graph() -> None:
    graphs = []

    def backend(module: Any, _example: Any) -> Any:
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        layer = per_document.PerDocumentLayer(cu_seqlens, max_seqlen, {})
        return layer.attend(AttentionCall(query, key, value, SCALE))

    for lengths in ((3, 4), (5, 6, 7), (9, 2, 2, 8)):
        batch = PackedBatch.from_lengths(lengths)
        query, key, value = (tensor.detach() for tensor in make_inputs(batch, torch.float32, sinks=False))
        layer = prepared("per_document", batch)
        expected = layer.attend(AttentionCall(query, key, value, SCALE))
        actual = attend(query, key, value, layer.cu_seqlens, layer.max_seqlen)
        torch.testing.assert_close(actual, expected)
    assert len(graphs) <= 2


def test_flops_are_those_of_the_documents() -> None:
    batch = PackedBatch.from_lengths((3, 5))
    inputs = make_inputs(batch, torch.float32, sinks=False)
    layer = prepared("per_document", batch)
    with FlopCounterMode(display=False) as forward:
        out = layer.attend(AttentionCall(*inputs, SCALE))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    pairs = 3 * 3 + 5 * 5
    product = 2 * HEADS * HEAD_DIM * pairs
    assert forward.get_total_flops() == 2 * product
    assert backward.get_total_flops() == 5 * product


def test_dropout_is_refused() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    layer = prepared("per_document", batch)
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1.*packed_attention='sdpa'"):
        layer.attend(AttentionCall(*make_inputs(batch, torch.float32, sinks=False), SCALE, dropout=0.1))
