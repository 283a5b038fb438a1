"""Attention over packed rows, plain, with shared prefixes, and static: masks, backends, operators against oracles."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import flash4_interface
import pytest
import torch
from attention_material import (
    CPU,
    HOPPER,
    PLAIN,
    SCALE,
    STATIC_KINDS,
    assert_as_near_as_dense,
    assert_as_plain,
    attend,
    check_operators,
    dense_attention,
    make_inputs,
    prepared,
    run,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_material import path_of, tree_row, trees
from static_material import bucket_for, rows, to_static
from static_material import make_inputs as collated
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall, gather_keys, shared_refusal
from fastpack_trl.attention.per_document import PerDocument
from fastpack_trl.attention.reference import additive, band_mask, document_attention
from fastpack_trl.attention.varlen import fold_sinks, sink_gradient
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import tiny_model

FAMILY = ((12, 5, 7, 1), (-1, 0, 0, 0))
DEEP = ((3, 4, 2, 6, 1, 5, 9, 1), (-1, 0, 0, 1, 1, 2, -1, 6))
"""Segments that follow their parent and some that do not, three levels, a second document, prompts of one token."""
ROWS: dict[str, tuple[Any, Any]] = {"plain": ((1, 7, 20, 2), None), "deep": DEEP}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 4, "value_dim": 12}, "sinks": {"sinks": True, "value_dim": 4},
    "window-sinks": {"window": 4, "sinks": True}, "softcap": {"softcap": 2.0},
}  # fmt: skip
ROW_KERNELS = ("varlen", "flash_attention_4")


@settings(max_examples=50, deadline=None)
@given(trees(), st.booleans(), st.sampled_from([None, 1, 3, 8, 20]), st.integers(0, 2))
def test_dense_mask_agrees_with_a_loop_over_documents(
    tree: tuple[list[int], list[int]], shares: bool, window: int | None, padding: int
) -> None:
    lengths, parents = tree if shares else (tree[0], [-1] * len(tree[0]))
    total = sum(lengths) + padding
    expected = torch.zeros(total, total, dtype=torch.bool)
    paths = [path_of(lengths, parents, piece) for piece in range(len(lengths))]
    for path in [*paths, list(range(sum(lengths), total))]:
        for place, query in enumerate(path):
            expected[query, path[max(0, place + 1 - (window or total)) : place + 1]] = True
    mask = dense_mask(tree_row(lengths, parents if shares else None, num_padding=padding), window, CPU)[0, 0]
    assert torch.equal(mask, expected)
    assert torch.equal(additive(mask).exp(), mask.float())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([None, 1, 5, 128, 129, 200]))
def test_xformers_mask_equals_the_dense_mask(lengths: list[int], window: int | None) -> None:
    pytest.importorskip("xformers", reason="an optional extra: pip install 'fastpack-trl[xformers]'")
    batch = PackedBatch.from_lengths(lengths)
    bias = prepared("xformers", batch, *({window} - {None})).biases[window]
    assert torch.equal(bias.materialize((1, 1, *[batch.total_tokens] * 2)) == 0, dense_mask(batch, window, CPU))


@pytest.mark.parametrize("name", ["per_document", *ROW_KERNELS, "functions of flash-attn-4"])
@settings(max_examples=40, deadline=None)
@given(
    tree=trees(), shares=st.booleans(), padding=st.integers(0, 2), window=st.sampled_from([None, 1, 4]),
    sinks=st.booleans(), softcap=st.sampled_from([None, 2.0]), value_dim=st.sampled_from([8, 4, 12]),
)  # fmt: skip
@example(([120, 5, 100], [-1, 0, 0]), True, 1, None, True, None, 8)
def test_output_and_gradients_in_float64_equal_dense_attention(
    name: str, tree: Any, shares: bool, padding: int, window: int | None, sinks: bool, softcap: float | None,
    value_dim: int,
) -> None:  # fmt: skip
    """Kernels run their twin here, flash-attn-4 also its two functions: a loop that takes their arguments."""
    softcap = softcap if name != "varlen" else None
    batch = tree_row(tree[0], tree[1] if shares else None, num_padding=padding)
    inputs = make_inputs(batch, torch.float64, sinks=sinks, value_dim=value_dim)
    expected = run(lambda tensors: dense_attention(batch, tensors, window, softcap), inputs)
    is_twin = name in BACKENDS
    layer = prepared(name if is_twin else "flash_attention_4", batch, *([window] if window else []))
    with nullcontext() if is_twin else flash4_interface.in_place_of_the_twin():
        actual = run(attend(layer, window, softcap), inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("per_document", "cpu", torch.float32),
        *((name, "cpu", torch.bfloat16) for name in ("per_document", *ROW_KERNELS)),
        *(
            pytest.param(name, "cuda", dtype, marks=pytest.mark.cuda)
            for name, other in (("varlen", torch.float16), ("per_document", torch.float32))
            for dtype in (torch.bfloat16, other)
        ),
    ],
)
def test_error_is_within_twice_that_of_dense(name: str, device: str, dtype: torch.dtype, kind: str, row: str) -> None:
    how = dict(KINDS[kind])
    window, softcap = how.pop("window", None), how.pop("softcap", None)
    if softcap and name == "varlen":
        pytest.skip("varlen has no softcap")
    batch = tree_row(*ROWS[row], num_padding=3)
    ours = attend(prepared(name, batch, 4, device=device), window, softcap, device)
    # torch's memory-efficient kernel sums in another order than its math path: in fp32 on an H200 its gradients of the
    # keys were 4.7e-7 from float64, those of the math path 1.5e-7.
    fused_in_fp32 = device == "cuda" and dtype == torch.float32
    floor = torch.finfo(dtype).eps * (4 if fused_in_fp32 else 1)
    assert_as_near_as_dense(batch, ours, window, softcap, dtype=dtype, floor=floor, **how)


@pytest.mark.parametrize("name", ["per_document", "varlen"])
def test_gradients_of_a_prefix_are_summed_in_fp32_over_its_branches(name: str) -> None:
    """Many small ones in bf16 beside a large one: added one by one they would be rounded away."""
    batch = tree_row([1, *[1] * 300], [-1, *[0] * 300])
    inputs = make_inputs(batch, torch.bfloat16)
    ours, exact = (torch.zeros(1) for _ in range(2))
    upstream = torch.full((1, batch.total_tokens, 4, 8), 2.0**-8)
    upstream[:, 1] = 1.0
    for dtype in (torch.bfloat16, torch.float64):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        out = attend(prepared(name, batch))(tensors)
        (gradient,) = torch.autograd.grad(out, tensors[2], upstream.to(dtype))
        ours, exact = exact, gradient[0, :, 0].double()
    assert (ours - exact).norm() <= 2**-6 * exact.norm()


@pytest.mark.parametrize("name", ["per_document", "flash_attention_4"])
def test_scores_of_sinks_and_softcaps_are_in_fp32_under_autocast_and_not_kept_for_backward(name: str) -> None:
    batch, sizes = PackedBatch.from_lengths((64, 64)), []
    ours, inputs = attend(prepared(name, batch), None, 2.0), make_inputs(batch, torch.float32, sinks=True)

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    def under_autocast(tensors: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda tensor: tensor):
            out: Tensor = ours(tensors)
        return out

    assert all(map(torch.equal, run(under_autocast, inputs), run(ours, inputs)))
    assert max(sizes) < 4 * 64 * 64, "of the heads of a document"


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 128], ids=["", "window"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_long_families_on_the_device_are_within_twice_the_error(window: int | None, deterministic: bool) -> None:
    """More than one block of the kernel: its alignment is that of whole blocks in the tiny rows above."""
    batch = tree_row((1000, 200, 130, 300, 640, 64, 64), (-1, 0, 0, 0, -1, 4, 4))
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours = attend(prepared("varlen", batch, *([window] if window else []), device="cuda"), window, None, "cuda")
        assert_as_near_as_dense(batch, ours, window, None, dtype=torch.bfloat16, floor=2**-8, value_dim=64, head_dim=64)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["varlen_attention", "flash4_attention"])
def test_operators_pass_torchs_own_checks(name: str) -> None:
    plain, shared = PackedBatch.from_lengths((3, 2)), tree_row((2, 2, 3), (-1, 0, 0))
    every = torch.arange(plain.total_tokens)
    for batch, index, ends_k, longest_k, window, has_sinks in (
        (plain, every, plain.cu_seqlens, 3, 2, True), (plain, every, plain.cu_seqlens, 3, 0, False),
        (shared, shared.shared.key_index, shared.shared.cu_seqlens_k, 7, 0, True),
    ):  # fmt: skip
        *tensors, sinks = make_inputs(batch, torch.float64, sinks=True)
        query, *keyed = (tensor.detach()[0].transpose(0, 1).contiguous() for tensor in tensors)
        leaves = [one.requires_grad_() for one in (query, *(gather_keys(one, index) for one in keyed))]
        sink = sinks if has_sinks else None
        row = (*leaves, sink, batch.cu_seqlens, ends_k, 3, longest_k, SCALE, window, 0.0)
        check_operators(name, row)
        with FlopCounterMode(display=False) as counter:
            getattr(torch.ops.fastpack, name)(*row)
        assert counter.get_total_flops() == 4 * query.numel() * longest_k


def test_sinks_on_a_kernel_without_them_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    sinks, mask = torch.randn(2, dtype=torch.float64, requires_grad=True), band_mask(7, 4)
    expected, lse = document_attention(query, key, value, mask, SCALE, sinks)
    upstream = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, sinks, upstream)
    plain, plain_lse = (one[0] for one in document_attention(query, key, value, mask, SCALE))
    out, folded = fold_sinks(plain.transpose(0, 1).clone(), plain_lse, sinks.detach())
    torch.testing.assert_close((out, folded), (expected[0].transpose(0, 1), lse[0]))
    torch.testing.assert_close(sink_gradient(upstream[0].transpose(0, 1), out, folded, sinks.detach()), gradient)


@pytest.mark.parametrize("parents", [None, (-1, 0, 0, -1, 3, 3)], ids=["", "shared"])
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_rows_of_other_lengths_trace_into_at_most_two_graphs(name: str, parents: Any) -> None:
    graphs, contiguous = list[Any](), list[bool]()

    def backend(module: Any, _example: Any) -> Any:
        graphs.append(module)
        for node in module.graph.nodes:
            if "attention_with_gradient" in str(node.target):
                contiguous.extend(argument.meta["example_value"].is_contiguous() for argument in node.args[:3])
        return module.forward

    def eager(layer: Any, *tensors: Tensor) -> Tensor:
        out: Tensor = layer.attend(AttentionCall(*tensors, SCALE))
        return out

    compiled, generator = torch.compile(eager, backend=backend, fullgraph=True, dynamic=True), torch.Generator()
    for _ in range(20):
        count = 6 if parents else int(torch.randint(2, 9, (1,), generator=generator))
        batch = tree_row(torch.randint(2, 30, (count,), generator=generator).tolist(), parents)
        # Head by head, as a rotary embedding with `cat` (gpt_oss) leaves them.
        tensors, layer = [one.detach() for one in make_inputs(batch, torch.float32)], prepared(name, batch)
        torch.testing.assert_close(compiled(layer, *tensors), eager(layer, *tensors))
    assert len(graphs) <= 2
    assert set(contiguous) == {True}, "a graph gives the kernel rows one after the other"


def test_call_that_a_kernel_lacks_is_refused_by_name() -> None:
    batch = PackedBatch.from_lengths((3, 2))
    for name, requested, message in (
        ("per_document", {"dropout": 0.1}, r"attention dropout \(0\.1\).*packed_attention='sdpa'"),
        ("varlen", {"dropout": 0.1}, r"varlen has no dropout.*set packed_attention='per_document'"),
        ("varlen", {"softcap": 30.0}, r"varlen has no softcap.*set packed_attention='per_document'"),
    ):
        call = AttentionCall(*make_inputs(batch, torch.float32), SCALE, **requested)
        with pytest.raises(ValueError, match=message):
            prepared(name, batch).attend(call)


def test_shared_row_is_refused_by_a_backend_that_does_not_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = tree_row(*FAMILY), tiny_model("llama")
    ids = torch.randint(3, 96, (1, batch.total_tokens))
    keywords = {"input_ids": ids, "packed_batch": batch, "use_cache": False, **to_transformers_kwargs(batch)}
    assert "xformers does not support shared prefixes" in shared_refusal(BACKENDS["xformers"], PLAIN)
    with packed_attention(model):
        expected = model(**keywords).logits
        assert torch.equal(expected, model(**keywords | {"position_ids": batch.position_ids.clone()}).logits)
        monkeypatch.setattr(PerDocument, "shares", False)
        with pytest.raises(PackingError, match="per_document does not support"):
            model(**keywords)


def test_operators_of_this_torch_take_the_arguments() -> None:
    segments = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    for operator, expected in (
        ("forward", f"query key value {segments} return_debug_mask"),
        ("backward", f"grad_out query key value out logsumexp {segments} rng_state unused"),
    ):
        arguments = getattr(torch.ops.aten, f"_flash_attention_{operator}").default._schema.arguments
        assert " ".join(argument.name for argument in arguments if not argument.kwarg_only) == expected
        keywords = {argument.name for argument in arguments if argument.kwarg_only}
        assert {"scale", "window_size_left", "window_size_right"} <= keywords


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_no_synchronisation_in_forward_and_backward_of_a_model(family: str) -> None:
    model = tiny_model(family)
    if family == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp.forward = lambda hidden: (0.5 * hidden, None)  # experts' own synchronizations are not attention's
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
                keywords = {"packed_batch": batch, "use_cache": False, **to_transformers_kwargs(batch)}
                with torch.autocast("cuda", torch.bfloat16):
                    hidden = model.model(input_ids=ids, **keywords).last_hidden_state
                hidden.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@settings(max_examples=40, deadline=None)
@given(
    first=rows, second=rows, tail=st.integers(0, 30), segments=st.integers(0, 4),
    longer=st.integers(0, 3), keys=st.integers(0, 60), keyed=st.booleans(), kind=st.sampled_from(sorted(STATIC_KINDS)),
)  # fmt: skip
@pytest.mark.parametrize("name", ["varlen", "flash_attention_4"])
def test_tail_empty_segments_and_surplus_keys_change_nothing_in_any_row_copied_in(
    name: str, first: Any, second: Any, tail: int, segments: int, longer: int, keys: int, keyed: bool, kind: str
) -> None:
    bucket = bucket_for(second, tail=tail, segments=segments, longer=longer, keys=keys, keyed=keyed)
    static = to_static(second, bucket)
    assert_as_plain(static, second, kind, name)
    if static.bucket.holds(Bucket.of(first["packed_batch"])):
        static.copy_row(first["packed_batch"], first["input_ids"])
        assert_as_plain(static, first, kind, name)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", STATIC_KINDS)
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize("longer", [0, 382])
def test_on_cuda_tail_empty_segments_and_surplus_keys_change_nothing(kind: str, shared: bool, longer: int) -> None:
    for seed in range(4):
        inputs = collated([90, 1, 130, 60, 200, 40], seed=seed, shared=shared).to("cuda")
        static = to_static(inputs, bucket_for(inputs, tail=219, keys=150, segments=3, longer=longer))
        assert_as_plain(static, inputs, kind, "varlen", device="cuda", dtype=torch.bfloat16)


def test_only_kernels_over_a_row_take_static_batches_up_to_where_int32_ends() -> None:
    bucket = Bucket(2048, 16, 512)
    takes = {name for name, backend in BACKENDS.items() if not backend.refuses_static(bucket, PLAIN)}
    assert takes == {"flash_attention_4", "varlen"}
    assert all(BACKENDS[name].refuses_static(bucket, PLAIN).startswith(name) for name in BACKENDS.keys() - takes)
    model, static = tiny_model("qwen3"), to_static(collated([3, 4]), Bucket(9, 4, 5))
    for path in ("per_document", "sdpa"):
        with packed_attention(model, path), pytest.raises(PackingError, match=rf"cannot run: {path} .*plain batch"):
            model.model(**static.keywords, use_cache=False)
    wide = replace(HOPPER, num_heads=64, head_dim=128)
    fits = Bucket(2**31 // (64 * 128) - 128 * 100 - 1, 100, 512)
    assert not BACKENDS["varlen"].refuses_static(fits, wide)
    assert "tokens in 101 segments" in BACKENDS["varlen"].refuses_static(fits._replace(segments=101), wide)
    with pytest.raises(ValueError, match=r"in 1 segments is too long for varlen's int32 backward: set packed_att"):
        prepared("varlen", PackedBatch.from_lengths((2**31 // (64 * 128) - 127,)), features=wide)
