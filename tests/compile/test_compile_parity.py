"""Compiled layers compute what eager ones do: families, LoRA, four-bit bases, experts."""

from __future__ import annotations

import contextlib

import pytest
import torch
from compile_material import (
    FAMILIES,
    OVERRIDES,
    PARTITIONED,
    Counting,
    cast_adapters,
    checkpoint,
    compare,
    compiled,
    four_bit,
    make,
    one_step,
    row,
)
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.packing.packed_batch import to_transformers_kwargs
from fastpack_trl.testing import gradients

pytestmark = pytest.mark.slow
"""Whole models are traced, and some partitioned."""


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_and_partitioned_within_twice_the_error_of_eager(family: str) -> None:
    """Differentiated where a graph is new to the partitioner: of a checkpoint, of windows, of experts."""
    lora = family == "qwen3"
    backend = PARTITIONED if family in ("qwen3", "gpt_oss") else Counting()
    compare(make(family, lora=lora, checkpointing=lora), backend)


def test_layers_of_apply_lora_keep_one_graph_while_their_adapters_change() -> None:
    """The adapters are cast outside of the layer, anew in each step: a trial must leave that graph to the run."""
    backend, data = Counting(), [row(seed) for seed in range(4)]
    results = []
    for with_graph in (False, True):
        model = make("llama", lora=True, checkpointing=True)
        with contextlib.ExitStack() as stack:
            stack.callback(cast_adapters(model, torch.bfloat16).revert)
            stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if with_graph:
                layers = stack.enter_context(compiled_layers(model, verbose=False, _backend=backend))
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            losses = []
            for one in data:
                losses.append(one_step(model, *one)[0])
                optimizer.step()
            results.append(losses)
    assert (backend.graphs, layers.path) == (1, "compiled"), layers.reason
    assert results[1] == pytest.approx(results[0], rel=1e-2)


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_router_logits_reach_the_auxiliary_loss(family: str, checkpointing: bool) -> None:
    model = make(family, checkpointing=checkpointing)
    ids, batch = row(0)

    def run() -> tuple[float, dict[str, Tensor], list[Tensor]]:
        model.zero_grad()
        keywords = to_transformers_kwargs(batch)
        out = model(input_ids=ids, packed_batch=batch, use_cache=False, output_router_logits=True, **keywords)
        (out.aux_loss + out.logits.logsumexp(-1).sum()).backward()
        return out.aux_loss.item(), gradients(model), [logits.detach() for logits in out.router_logits]

    with packed_attention(model):
        expected = run()
    with compiled(model) as layers:
        actual = run()
    assert layers.path == "compiled", layers.reason
    assert len(actual[2]) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [False, True], ids=["peft", "apply_lora"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_four_bit_base_is_as_near_to_float64_as_eager(device: str, fast: bool, inductor: None) -> None:
    pytest.importorskip("bitsandbytes")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model, exact_model = four_bit(device, dtype)
    checkpoint(model)
    autocast = None if device == "cpu" else dtype
    with contextlib.ExitStack() as stack:
        if fast:
            stack.callback(cast_adapters(model, autocast).revert)
        backend = "inductor" if device == "cuda" else Counting()
        rows = 3 if device == "cpu" else 6
        compare(model, backend, device=device, autocast=autocast, rows=rows, reference=exact_model)


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_bf16_within_twice_the_error_of_eager(family: str, lora: bool, inductor: None) -> None:
    # Experts in float32 under autocast run transformers' own operator, which torch 2.11 cannot trace.
    dtype = torch.bfloat16 if family in OVERRIDES else torch.float32
    model = make(family, lora=lora, checkpointing=lora, head_dim=16).to("cuda", dtype)
    compare(model, "inductor", device="cuda", autocast=torch.bfloat16, rows=6)
