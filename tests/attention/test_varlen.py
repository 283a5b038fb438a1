"""`varlen`: everything around torch's flash kernel on the CPU (through its twin), and the kernel itself on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from attention_material import HOPPER, PLAIN, SCALE, attend, errors, make_inputs, prepared, run
from torch import Tensor

from fastpack_trl.attention import cudnn, varlen
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import tiny_model

LENGTHS = (1, 7, 20, 2)
INT32 = varlen.elements_per_token(PLAIN) * ((20 + 128) + (2 + 128) + 1)
"""A limit that the last two of these documents just keep."""
# torch 2.11 (the oldest supported) and 2.13 share these; later ones only add keywords with defaults.
FORWARD = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
    "is_causal", "rng_state", "unused",
)  # fmt: skip


def test_a_row_that_int32_cannot_index_is_cut_between_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackedBatch.from_lengths(LENGTHS)
    inputs = make_inputs(batch, torch.float64, sinks=True)
    whole = prepared("varlen", batch)
    assert len(whole.parts) == 1
    monkeypatch.setattr(varlen, "_INT32", INT32)
    parts = prepared("varlen", batch)
    assert [(part.start, part.end) for part in parts.parts] == [(0, 8), (8, 30)]
    results = [run(attend(layer), inputs) for layer in (whole, parts)]
    for one, several in zip(*results, strict=True):
        torch.testing.assert_close(several, one)


@pytest.mark.parametrize(
    ("lengths", "changes", "bounds"),
    [
        ((4096, 4200), {}, [0, 4096, 8296]),
        ((8192,), {}, [0, 8192]),
        ((8000, 100, 92), {}, [0, 0]),
        ((1500, 1600), {}, [0, 0]),
        ((9000, 1), {}, [0, 0]),  # cuDNN takes no key alone
        ((8192,), {"windows": frozenset({128})}, None),
        ((8192,), {"sinks": True}, None),
        ((8192,), {"head_dim": 192}, None),
        ((8192,), {"capability": (8, 0)}, None),
    ],
)
def test_long_documents_go_to_the_kernel_that_was_faster_on_the_device(
    lengths: tuple[int, ...], changes: dict[str, Any], bounds: list[int] | None
) -> None:
    batch = PackedBatch.from_lengths(lengths)
    features = replace(HOPPER, **changes)
    layer = prepared("varlen", batch, *features.windows, features=features)
    found = layer.parts[0].bounds
    assert (None if found is None else found.tolist()) == bounds


def test_each_part_of_a_row_that_is_cut_has_bounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_INT32", INT32)
    monkeypatch.setitem(varlen.LONG_DOCUMENTS, (9, 0), 8)
    layer = prepared("varlen", PackedBatch.from_lengths(LENGTHS), features=HOPPER)
    assert [part.bounds.tolist() for part in layer.parts] == [[0, 0], [0, 20, 22]]


def test_one_call_per_document_is_by_their_lengths_on_the_host() -> None:
    """Others than those on the device, to tell who is read; gradients too."""
    inputs = make_inputs(PackedBatch.from_lengths((5, 7)), torch.float64)
    results = []
    for lengths, bounds in (((12,), [0, 5, 12]), ((5, 7), None)):
        part = prepared("varlen", PackedBatch.from_lengths(lengths)).parts[0]
        part = part._replace(bounds=None if bounds is None else torch.tensor(bounds, dtype=torch.int32))
        layer = varlen.VarlenLayer((part,))
        results.append(run(attend(layer), inputs))
    for per_document, whole_row in zip(*results, strict=True):
        assert torch.equal(per_document, whole_row)


def test_operators_of_cudnn_take_the_arguments_that_are_given() -> None:
    """Shapes alone: on the meta device; results of a device are compared below."""
    query, key = (torch.randn(24, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    for documents in ([slice(0, 24)], [slice(0, 10), slice(10, 24)]):
        out, lse = cudnn.forward(query, key, key, documents, SCALE)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, (4, 24), torch.float32)
        assert out.is_contiguous()
        dq, dk, dv = cudnn.backward(out, out, lse, query, key, key, documents, SCALE)
        assert (dq.shape, dk.shape, dv.shape) == (query.shape, key.shape, key.shape)
        assert all(grad.is_contiguous() for grad in (dq, dk, dv))
    assert not cudnn.serves(torch.zeros(24, 4, 16), torch.zeros(24, 2, 16), [slice(0, 24)], SCALE)


def long_inputs(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).bfloat16().cuda().requires_grad_() for shape in shapes]


@pytest.mark.cuda
@pytest.mark.parametrize("lengths", [(8196,), (4096, 4100)])
@pytest.mark.parametrize("form", ["eager", "compiled", "deterministic"])
def test_long_documents_on_the_device_within_twice_the_error_of_dense_attention(
    lengths: tuple[int, ...], form: str
) -> None:
    batch = PackedBatch.from_lengths(lengths)
    device, inputs = torch.device("cuda"), long_inputs(lengths)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    layer = prepared("varlen", batch, features=HOPPER, device=device)
    whole = prepared("varlen", PackedBatch.from_lengths(lengths), device=device)
    mask = dense_mask(batch, None, device)

    def dense(tensors: list[Tensor]) -> Tensor:
        q, k, v = tensors
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=SCALE).transpose(1, 2)

    def ours(tensors: list[Tensor], layer: Any) -> Tensor:
        return layer.attend(AttentionCall(*tensors, SCALE))

    exact, budget = run(dense, exact_inputs), run(dense, inputs)
    attend = torch.compile(ours, fullgraph=True, dynamic=True) if form == "compiled" else ours
    torch.use_deterministic_algorithms(form == "deterministic", warn_only=False)  # cuDNN is not: flash over the row
    try:
        for chosen in (layer, whole):
            actual = run(lambda tensors, chosen=chosen: attend(tensors, chosen), inputs)
            assert (errors(actual, exact) <= 2 * errors(budget, exact) + 2**-8).all()
    finally:
        torch.use_deterministic_algorithms(False)


def kernels_of(call: Any) -> str:
    """Names of the kernels that a call launches, a graph's too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() not in varlen.LONG_DOCUMENTS,
    reason="needs a device on which one call per document is faster",
)
@pytest.mark.parametrize("form", ["eager", "compiled", "recorded"])
def test_long_documents_run_cudnns_kernels_in_every_form(form: str) -> None:
    inputs = long_inputs((8192,))
    layer = prepared("varlen", PackedBatch.from_lengths((8192,)), features=HOPPER, device="cuda")

    def attend(*tensors: Tensor) -> Tensor:
        return layer.attend(AttentionCall(*tensors, SCALE))

    if form == "compiled":
        attend = torch.compile(attend, fullgraph=True, dynamic=True)

    def step() -> list[Tensor]:
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # From the first call on: autograd's nodes of the inputs belong to the stream that they were made on.
    with torch.cuda.stream(stream):
        expected, call = step(), step
        if form == "recorded":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results = step()
            call = graph.replay
    torch.cuda.synchronize()
    names = kernels_of(call)
    assert "cudnn" in names
    assert "flash_bwd" not in names
    if form == "recorded":
        for found, plain in zip(results, expected, strict=True):
            torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)  # sums of gradients are not in one order


def test_bounds_of_the_int32_guard() -> None:
    heads = 64 * 128
    fits = 2**31 // heads - 128 - 1
    assert varlen.indexable_runs((fits,), heads) == [(0, 1)]
    assert varlen.indexable_runs((fits // 2, fits // 2, 7), heads) == [(0, 1), (1, 3)]
    with pytest.raises(ValueError, match=r"too long for varlen's int32 backward.*set packed_attention="):
        varlen.indexable_runs((fits + 2,), heads)


def test_a_graph_gives_the_kernel_rows_one_after_the_other() -> None:
    """A rotary embedding with `cat` (gpt_oss) leaves a layout head by head, which the result would inherit."""
    seen: list[bool] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if "varlen_attention" in str(node.target):
                seen.extend(argument.meta["example_value"].is_contiguous() for argument in node.args[:3])
        return graph.forward

    batch = PackedBatch.from_lengths(LENGTHS)
    layer = prepared("varlen", batch)
    by_head = [tensor.detach().contiguous() for tensor in make_inputs(batch, torch.float32)]
    assert not by_head[0][0].transpose(0, 1).is_contiguous()
    compiled = torch.compile(
        lambda *tensors: layer.attend(AttentionCall(*tensors, SCALE)), backend=backend, fullgraph=True
    )
    torch.testing.assert_close(compiled(*by_head), layer.attend(AttentionCall(*by_head, SCALE)))
    assert seen == [True] * 3


def test_operators_of_this_torch_take_the_arguments_that_are_given() -> None:
    for operator, expected in (
        (torch.ops.aten._flash_attention_forward, FORWARD),
        (torch.ops.aten._flash_attention_backward, BACKWARD),
    ):
        schema = operator.default._schema
        positional = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
        keywords = {argument.name for argument in schema.arguments if argument.kwarg_only}
        assert positional == expected
        assert {"scale", "window_size_left", "window_size_right"} <= keywords


class NoExperts(torch.nn.Module):
    """In the place of a mixture of experts, whose own synchronisations are not attention's."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return 0.5 * hidden, None


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_no_synchronisation_in_forward_and_backward_of_a_model(family: str) -> None:
    model = tiny_model(family)
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp = NoExperts()
    model.cuda()
    ids = torch.randint(3, 96, (1, 30), device="cuda")
    # The first pass compiles and warms up; the second has a batch of its own, for which everything is built anew.
    batches = [PackedBatch.from_lengths(lengths).to("cuda") for lengths in ((9, 1, 14, 6), (2, 20, 8))]
    with packed_attention(model, compute_dtype=torch.bfloat16) as attention:
        assert attention.path in ("flash_attention_4", "varlen"), attention.choice.reason
        for batch, mode in zip(batches, ("default", "error"), strict=True):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                with torch.autocast("cuda", torch.bfloat16):
                    hidden = model.model(
                        input_ids=ids, packed_batch=batch, use_cache=False, **to_transformers_kwargs(batch)
                    ).last_hidden_state
                hidden.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "afmoe"])
def test_fp32_weights_under_autocast_are_proven_on_the_device(family: str) -> None:
    model = tiny_model(family).cuda()
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products are made for bf16 weights
    with packed_attention(model, compute_dtype=torch.bfloat16) as attention, torch.autocast("cuda", torch.bfloat16):
        assert attention.path in ("flash_attention_4", "varlen"), attention.choice.reason
        assert verify_packing(model, attention=attention).proven
