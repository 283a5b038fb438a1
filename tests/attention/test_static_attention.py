"""Attention over static batches: empty segments, a tail, rows that kernels leave uninitialised, tensors used again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_material import HEAD_DIM, HEADS, HOPPER, KV_HEADS, PLAIN, SCALE, errors, prepared, run
from hypothesis import given, settings
from hypothesis import strategies as st
from static_material import bucket_for, make_inputs, make_rows, shared_rows, to_static
from torch import Tensor

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.varlen_common import RowLayer
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.static_batch import copy_into
from fastpack_trl.testing import tiny_model

KINDS = {"plain": {}, "window": {"window": 4}, "sinks": {"sinks": True}, "both": {"window": 4, "sinks": True}}


def tensors_of(tokens: int, *, sinks: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(HEADS,)] if sinks else []
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attended(
    tensors: list[Tensor], cu_seqlens: Tensor, max_seqlen: int, upstream: Tensor, *, window: int | None = None,
    sinks: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Output and gradients of the varlen kernel, or of its twin on the CPU."""
    layer = RowLayer("varlen", cu_seqlens, max_seqlen, cu_seqlens, max_seqlen)
    out = layer.attend(AttentionCall(*tensors[:3], SCALE, window, sinks=tensors[3] if sinks else None))
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


segments = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(segments, st.lists(st.integers(0, 5), max_size=4), st.sampled_from(sorted(KINDS)))
def test_segments_of_length_0_change_no_bit(lengths: list[int], places: list[int], kind: str) -> None:
    tensors = tensors_of(sum(lengths), sinks=KINDS[kind].get("sinks", False))
    upstream = torch.randn(1, sum(lengths), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    spread = list(lengths)
    for place in places:
        spread.insert(min(place, len(spread)), 0)
    expected = attended(tensors, offsets(lengths), max(lengths), upstream, **KINDS[kind])
    found = attended(tensors, offsets(spread), max(lengths) + 3, upstream, **KINDS[kind])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=30, deadline=None)
@given(segments, st.integers(1, 6), st.sampled_from(sorted(KINDS)))
def test_what_stands_in_the_tail_changes_no_bit_of_the_documents(lengths: list[int], tail: int, kind: str) -> None:
    tokens, sinks = sum(lengths), KINDS[kind].get("sinks", False)
    upstream = torch.randn(1, tokens + tail, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    upstream[:, tokens:] = 0  # no loss
    results = []
    for seed in (1, 2):
        tensors, other = tensors_of(tokens + tail, sinks=sinks), tensors_of(tokens + tail, seed=seed)
        for tensor, content in zip(tensors[:3], other, strict=True):
            tensor.data[:, :, tokens:] = content.detach()[:, :, tokens:]
        out, *grads = attended(tensors, offsets([*lengths, tail]), max(*lengths, tail), upstream, **KINDS[kind])
        assert all(not grad[:, :, tokens:].any() for grad in grads[:3])
        results.append([out[:, :tokens], *(grad[:, :, :tokens] for grad in grads[:3]), *grads[3:]])
    for one, same in zip(*results, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_shows_what_the_kernel_leaves_uninitialised(kind: str) -> None:
    lengths, longest = [3, 7, 2], 4
    tokens, sinks = sum(lengths), KINDS[kind].get("sinks", False)
    tensors = tensors_of(tokens + 2, sinks=sinks)
    upstream = torch.zeros(1, tokens + 2, HEADS, HEAD_DIM)  # 0 x NaN is NaN
    out, *grads = attended(tensors, offsets(lengths), longest, upstream, **KINDS[kind])
    missing = torch.zeros(tokens + 2, dtype=torch.bool)
    missing[3 + longest : 10] = missing[tokens:] = True
    assert torch.equal(out[0].isnan().all(dim=(1, 2)), missing)
    assert torch.equal(out[0].isnan().any(dim=2).any(dim=1), missing)
    missing[3:10] = True  # in backward nothing of a segment that is too long
    for grad in grads[:3]:
        assert torch.equal(grad[0].isnan().any(dim=2).any(dim=0), missing)
    if sinks:
        assert grads[3].isnan().all()


def test_a_prepared_layer_attends_to_the_documents_of_the_row_that_is_copied_in() -> None:
    first, second = make_rows([[5, 9], [3]]), make_rows([[1, 2], [4, 6]])
    bucket = Bucket(tokens=24, segments=8, max_seqlen=9, loss_tokens=20, parts=2)
    static = to_static(first, bucket)
    layer = prepared("varlen", static.batch, features=HOPPER)
    for inputs in (first, second):
        copy_into(static, inputs)
        plain = inputs["packed_batch"]
        tokens = plain.total_tokens
        tensors = tensors_of(bucket.tokens)
        cut = [tensor.detach()[:, :, :tokens].requires_grad_() for tensor in tensors]
        alone = prepared("varlen", plain)
        expected = run(lambda t, layer=alone: layer.attend(AttentionCall(*t, SCALE)), cut)
        upstream = torch.zeros(1, bucket.tokens, HEADS, HEAD_DIM)
        upstream[:, :tokens] = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1))
        out = layer.attend(AttentionCall(*tensors, SCALE))
        found = [out[:, :tokens], *torch.autograd.grad(out, tensors, upstream)]
        assert torch.equal(found[0], expected[0])
        for grad, other in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(grad[:, :, :tokens], other)
            assert not grad[:, :, tokens:].any()


def assert_as_plain(static: Any, inputs: Any, kind: str, name: str, *, device: str = "cpu", dtype: Any = None) -> None:
    """Output and gradients of a row with shared prefixes in its static form, whose tail has no loss, as in its own."""
    plain, how, tokens = inputs["packed_batch"], KINDS[kind], sum(inputs["packed_batch"].seq_lengths)
    row = max(static.bucket.tokens, plain.total_tokens)
    windows = [how["window"]] if "window" in how else []
    layer, alone = (prepared(name, batch, *windows, device=device) for batch in (static.batch, plain))
    tensors = tensors_of(row, sinks="sinks" in how, dtype=dtype or torch.float64)
    tensors = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    upstream = torch.zeros(1, row, HEADS, HEAD_DIM, dtype=tensors[0].dtype, device=device)
    draw = torch.Generator().manual_seed(1)
    upstream[:, :tokens] = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=draw).to(upstream)
    found = []
    for one, row in ((layer, static.bucket.tokens), *[(alone, plain.total_tokens)] * 2):
        cut = [t.detach()[:, :, :row].requires_grad_() if t.dim() == 4 else t for t in tensors]
        sinks = cut[3] if len(cut) > 3 else None
        out = one.attend(AttentionCall(*cut[:3], SCALE, how.get("window"), sinks=sinks))
        grads = torch.autograd.grad(out, cut, upstream[:, :row].contiguous())
        assert all(grad.isfinite().all() for grad in grads)
        assert all(not grad[:, :, tokens:].any() for grad in grads[:3])
        found.append([out[:, :tokens], *(grad[:, :, :tokens] if grad.dim() == 4 else grad for grad in grads)])
    for ours, once, again in zip(*found, strict=True):
        # Where two plain calls differ, by the order of atomic additions, so may this one.
        budget = 2 * (again - once).norm() + 4 * torch.finfo(once.dtype).eps * (1 + once.norm())
        assert (ours - once).norm() <= budget


@settings(max_examples=30, deadline=None)
@given(shared_rows, shared_rows, st.integers(1, 30), st.integers(0, 60), st.sampled_from(sorted(KINDS)))
@pytest.mark.parametrize("name", ["varlen", "flash_attention_4"])
def test_keys_that_are_left_over_change_nothing(
    name: str, first: Any, second: Any, tail: int, keys: int, kind: str
) -> None:
    static = to_static(second, bucket_for(second, tail=tail, keys=keys, segments=2, keyed=True))
    assert_as_plain(static, second, kind, name)
    if static.bucket.holds(RowSize.of(first["packed_batch"])):
        copy_into(static, first)
        assert_as_plain(static, first, kind, name)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda_keys_that_are_left_over_change_nothing(kind: str) -> None:
    for seed in range(4):
        inputs = make_inputs([90, 130, 60, 200, 40], seed=seed, shared=True).to("cuda")
        static = to_static(inputs, bucket_for(inputs, tail=37, keys=150, segments=3))
        assert_as_plain(static, inputs, kind, "varlen", device="cuda", dtype=torch.bfloat16)


def test_who_takes_static_batches() -> None:
    bucket = Bucket(2048, 16, 512, 2048)
    takes = {name for name, backend in BACKENDS.items() if not backend.refuses_static(bucket, PLAIN)}
    assert takes == {"flash_attention_4", "varlen"}
    for name in BACKENDS.keys() - takes:
        assert BACKENDS[name].refuses_static(bucket, PLAIN).startswith(name), "named"


def test_capacity_counts_where_int32_ends() -> None:
    wide = replace(HOPPER, num_heads=64, head_dim=128)
    fits = Bucket(2**31 // (64 * 128) - 128 * 100 - 1, 100, 512, 64)
    assert not BACKENDS["varlen"].refuses_static(fits, wide)
    more = fits._replace(segments=101)
    assert "tokens in 101 segments" in BACKENDS["varlen"].refuses_static(more, wide)


@pytest.mark.parametrize("path", ["per_document", "sdpa"])
def test_a_static_batch_under_an_attention_that_cannot_take_it_is_refused_by_name(path: str) -> None:
    model = tiny_model("qwen3")
    static = to_static(make_inputs([3, 4]), Bucket(9, 4, 5, 9))
    with packed_attention(model, path), pytest.raises(PackingError, match=rf"cannot run: {path} .*plain batch"):
        model.model(**{name: value for name, value in static.keywords.items() if name != "labels"}, use_cache=False)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [130, 512])
def test_on_cuda_empty_segments_and_a_tail_are_within_what_two_runs_differ(kind: str, longest: int) -> None:
    """Forward bit-equal; backward, whose sums have no fixed order, within twice the difference of two equal calls."""
    lengths, tail = [100, 1, 130, 60], [130, 89]
    tokens, sinks = sum(lengths), KINDS[kind].get("sinks", False)
    row = tokens + sum(tail)
    tensors = [t.detach().cuda().requires_grad_() for t in tensors_of(row, sinks=sinks, dtype=torch.bfloat16)]
    cut = [t.detach()[:, :, :tokens].requires_grad_() if t.dim() == 4 else t for t in tensors]
    upstream = torch.randn(1, row, HEADS, HEAD_DIM).bfloat16().cuda()
    upstream[:, tokens:] = 0
    plain = [
        attended(cut, offsets(lengths).cuda(), 130, upstream[:, :tokens].contiguous(), **KINDS[kind]) for _ in range(2)
    ]
    static = attended(tensors, offsets([*lengths, *tail, 0, 0, 0]).cuda(), longest, upstream, **KINDS[kind])
    found = [static[0][:, :tokens], *(g[:, :, :tokens] if g.dim() == 4 else g for g in static[1:])]
    assert torch.equal(found[0], plain[0][0])
    assert all(tensor.isfinite().all() for tensor in static)
    budget = 2 * errors(plain[1], [t.double() for t in plain[0]]) + torch.finfo(torch.bfloat16).eps
    assert (errors(found, [t.double() for t in plain[0]]) <= budget).all()


@pytest.mark.cuda
def test_on_cuda_a_captured_layer_replays_for_other_documents() -> None:
    first, second = (make_rows(parts, device="cuda") for parts in ([[50, 90], [30]], [[10, 20], [40, 60]]))
    static = to_static(first, Bucket(tokens=256, segments=8, max_seqlen=128, loss_tokens=256, parts=2))
    layer = prepared("varlen", static.batch, features=HOPPER, device="cuda")
    tensors = [t.detach().cuda().requires_grad_() for t in tensors_of(256, dtype=torch.bfloat16)]
    call: Any = AttentionCall(*tensors, SCALE)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            out = layer.attend(call)
            torch.autograd.grad(out, tensors, torch.ones_like(out))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            out = layer.attend(call)
            grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
        for inputs in (first, second):
            copy_into(static, inputs)
            graph.replay()
            expected = layer.attend(call)
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
            others = torch.autograd.grad(expected, tensors, torch.ones_like(expected))
            assert (errors(list(grads), [t.double() for t in others]) <= 2**-7).all()
