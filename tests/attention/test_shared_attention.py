"""Attention over rows that hold a shared prefix once: random trees against a dense mask, in float64 and on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_material import (
    CPU,
    PLAIN,
    SCALE,
    assert_as_near_as_dense,
    attend,
    check_operators,
    dense_attention,
    make_inputs,
    prepared,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_material import path_of, tree_row, trees
from torch import Tensor

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall, Backend
from fastpack_trl.attention.per_document import PerDocument
from fastpack_trl.attention.varlen_common import RowInputs, gather_keys
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.packed_batch import to_transformers_kwargs
from fastpack_trl.testing import tiny_model

FAMILY = ((12, 5, 7, 1), (-1, 0, 0, 0))
DEEP = ((3, 4, 2, 6, 1, 5, 9, 1), (-1, 0, 0, 1, 1, 2, -1, 6))
"""Segments that follow their parent and some that do not, three levels, a second document, prompts of one token."""
ROWS = {"pair": ((9, 4, 6), (-1, 0, 0)), "family": FAMILY, "deep": DEEP, "one token": ((1, 1, 3), (-1, 0, 0))}


@settings(max_examples=100, deadline=None)
@given(trees(), st.sampled_from([None, 1, 3, 8]), st.integers(0, 2))
def test_the_mask_agrees_with_a_loop_over_documents(
    tree: tuple[list[int], list[int]], window: int | None, padding: int
) -> None:
    lengths, parents = tree
    total = sum(lengths) + padding
    expected = torch.zeros(total, total, dtype=torch.bool)
    for piece in range(len(lengths)):
        path = path_of(lengths, parents, piece)
        for place, query in enumerate(path):
            expected[query, path[max(0, place + 1 - (window or total)) : place + 1]] = True
    for query in range(sum(lengths), total):
        expected[query, max(sum(lengths), query + 1 - (window or total)) : query + 1] = True
    batch = tree_row(lengths, parents, num_padding=padding)
    assert torch.equal(dense_mask(batch, window, CPU)[0, 0], expected)


@settings(max_examples=60, deadline=None)
@given(
    tree=trees(), padding=st.integers(0, 2), window=st.sampled_from([None, 1, 4]), sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    name=st.sampled_from(["per_document", "varlen", "flash_attention_4"]),
)  # fmt: skip
def test_output_and_gradients_are_those_of_a_dense_mask(
    tree: tuple[list[int], list[int]], padding: int, window: int | None, sinks: bool, softcap: float | None, name: str
) -> None:
    """Grouped heads in all of them. float64, in which the kernels' own error is that of the last places."""
    softcap = softcap if name != "varlen" else None
    batch = tree_row(*tree, num_padding=padding)
    inputs = make_inputs(batch, torch.float64, sinks=sinks)
    expected = run(lambda tensors: dense_attention(batch, tensors, window, softcap), inputs)
    actual = run(attend(prepared(name, batch, *([window] if window else [])), window, softcap), inputs)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4], ids=["", "window"])
@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        *(("per_document", "cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
        ("varlen", "cpu", torch.bfloat16),
        ("flash_attention_4", "cpu", torch.bfloat16),
        *(
            pytest.param(name, "cuda", dtype, marks=pytest.mark.cuda)
            for name, dtype in (
                ("varlen", torch.bfloat16), ("varlen", torch.float16), ("per_document", torch.bfloat16),
                ("per_document", torch.float32),
            )
        ),
    ],
)  # fmt: skip
def test_forward_and_gradients_within_twice_the_error_of_dense_attention(
    name: str, device: str, dtype: torch.dtype, window: int | None, sinks: bool, row: str
) -> None:
    batch = tree_row(*ROWS[row], num_padding=3)
    ours = attend(prepared(name, batch, 4, device=device), window, None, device)
    # torch's memory-efficient kernel sums in another order than its math path: in fp32 on an H200 its gradients of the
    # keys were 4.7e-7 from float64, those of the math path 1.5e-7.
    fused_in_fp32 = device == "cuda" and dtype == torch.float32
    floor = torch.finfo(dtype).eps * (4 if fused_in_fp32 else 1)
    assert_as_near_as_dense(batch, ours, window, None, dtype=dtype, floor=floor, sinks=sinks)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 128], ids=["", "window"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_long_families_on_the_device_are_those_of_a_dense_mask(window: int | None, deterministic: bool) -> None:
    """More than one block of the kernel: its alignment is that of whole blocks in the tiny rows above."""
    batch = tree_row((1000, 200, 130, 300, 640, 64, 64), (-1, 0, 0, 0, -1, 4, 4))
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours = attend(prepared("varlen", batch, *([window] if window else []), device="cuda"), window, None, "cuda")
        assert_as_near_as_dense(batch, ours, window, None, dtype=torch.bfloat16, floor=2**-8, value_dim=64, head_dim=64)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [0, 4], ids=["", "window"])
def test_empty_segments_on_the_device_change_nothing(window: int) -> None:
    """Segments without queries, without keys before their own, and without any: surplus ones of a static row."""
    batch = tree_row(*FAMILY)
    assert batch.shared is not None
    inputs = [tensor.detach()[0].transpose(0, 1).cuda().bfloat16() for tensor in make_inputs(batch, torch.float32)]
    query, *keyed = inputs
    key, value = (gather_keys(tensor, batch.shared.key_index.cuda()) for tensor in keyed)
    ends, ends_k = batch.cu_seqlens.tolist(), batch.shared.cu_seqlens_k.tolist()
    results = []
    for q_ends, k_ends in ((ends, ends_k), ([0, *ends, ends[-1]], [0, *ends_k, ends_k[-1]])):
        tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device="cuda") for bounds in (q_ends, k_ends))
        row = RowInputs(*tensors, cu_q, None, window, SCALE, 128, cu_k, 128)
        out = torch.ops.fastpack.varlen_attention_with_gradient(*row)[0]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


def test_operators_pass_torchs_own_checks() -> None:
    batch = tree_row((2, 2, 3), (-1, 0, 0))
    assert batch.shared is not None
    query, key, value, sinks = make_inputs(batch, torch.float64, sinks=True)
    index, ends_k = batch.shared.key_index, batch.shared.cu_seqlens_k
    tokens = [tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in (query, key, value)]
    keys = [gather_keys(tensor.detach(), index).requires_grad_() for tensor in tokens[1:]]
    check_operators("varlen_attention", (tokens[0], *keys, batch.cu_seqlens, sinks, 0, SCALE, 4, ends_k, 7, 0.0))


@pytest.mark.parametrize("name", ["varlen", "flash_attention_4"])
def test_traces_without_a_graph_break_and_without_lengths_in_the_graph(name: str) -> None:
    graphs = []

    def backend(module: Any, _example: Any) -> Any:
        graphs.append(module)
        return module.forward

    def eager(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = layer.attend(AttentionCall(query, key, value, SCALE))
        return out

    compiled = torch.compile(eager, backend=backend, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(2, 20, (6,), generator=generator).tolist()
        batch = tree_row(lengths, (-1, 0, 0, -1, 3, 3))
        tensors, layer = [one.detach() for one in make_inputs(batch, torch.float32)], prepared(name, batch)
        torch.testing.assert_close(compiled(layer, *tensors), eager(layer, *tensors))
    assert len(graphs) <= 2


def test_backends_without_a_form_for_it_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tree_row(*FAMILY)
    model = tiny_model("llama")
    ids = torch.randint(3, 96, (1, batch.total_tokens))
    for name in ("xformers",):
        assert f"{name} has no form" in BACKENDS[name].refuses_shared(PLAIN)
    monkeypatch.setattr(PerDocument, "refuses_shared", Backend.refuses_shared)
    with packed_attention(model, "per_document"), pytest.raises(PackingError, match="per_document has no form"):
        model(input_ids=ids, packed_batch=batch, **to_transformers_kwargs(batch))


def test_edited_positions_of_a_shared_row_are_refused_and_equal_ones_are_not() -> None:
    batch = tree_row(*FAMILY)
    model = tiny_model("llama")
    ids = torch.randint(3, 96, (1, batch.total_tokens))
    kwargs = to_transformers_kwargs(batch) | {"packed_batch": batch, "use_cache": False}
    with packed_attention(model):
        expected = model(input_ids=ids, **kwargs).logits
        again = model(input_ids=ids, **kwargs | {"position_ids": batch.position_ids.clone()}).logits
        assert torch.equal(expected, again)
        with pytest.raises(ValueError, match="were edited or cut after collation"):
            model(input_ids=ids, **kwargs | {"position_ids": batch.position_ids + 1})
        batch.position_ids.add_(1)
        with pytest.raises(ValueError, match="were edited or cut after collation"):
            model(input_ids=ids, **kwargs)
