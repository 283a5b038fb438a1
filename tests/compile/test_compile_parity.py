"""Compiled layers compute what eager ones do: families, LoRA, four-bit bases, experts; rows share a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compile_material import (
    FAMILIES,
    OVERRIDES,
    PARTITIONED,
    Counting,
    cast_adapters,
    compare,
    compiled,
    make,
    one_step,
    row,
)
from peft import LoraConfig, get_peft_model
from static_material import bucket_for, make_rows, to_static
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.moe.apply import apply_moe
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
                layers = stack.enter_context(compiled_layers(model, _backend=backend))
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


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_bf16_within_twice_the_error_of_eager(family: str, lora: bool, inductor: None) -> None:
    # Experts in float32 under autocast run transformers' own operator, which torch 2.11 cannot trace.
    dtype = torch.bfloat16 if family in OVERRIDES else torch.float32
    model = make(family, lora=lora, checkpointing=lora, head_dim=16).to("cuda", dtype)
    compare(model, "inductor", device="cuda", autocast=torch.bfloat16, rows=6)


@contextlib.contextmanager
def adapted(family: str, backend: Any) -> Iterator[tuple[Any, Any]]:
    """A model with adapters of ours, also of its experts, that is compiled; it and the compiled layers."""
    experts = family == "gpt_oss"
    config = LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", *([] if experts else ["gate_proj", "up_proj"])],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if experts else None,
        init_lora_weights=False,
    )  # fmt: skip
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if experts else {}
    model = get_peft_model(make(family, num_hidden_layers=4, **kinds), config).train()
    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model, "varlen"))
        stack.enter_context(apply_moe(model))
        stack.callback(apply_lora(model).revert)
        yield model, stack.enter_context(compiled_layers(model, _backend=backend))


def run(model: Any, inputs: Any) -> None:
    model(**inputs, use_cache=False).logits.sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_merged_and_static_rows_run_the_graph_of_the_plain_ones(family: str) -> None:
    """Each further graph is seconds of a first step."""
    graphs = Counting()
    with adapted(family, graphs) as (model, layers):
        plain, merged = make_rows([[7, 9]]), make_rows([[7, 9], [4, 6, 8]])
        run(model, plain)
        once = graphs.graphs
        assert once == len(layers.kinds) < 4
        run(model, merged)
        run(model, to_static(plain, bucket_for(plain, tail=20, segments=3)).keywords)
        run(model, to_static(merged, bucket_for(merged, tail=9, segments=5)).keywords)
        assert graphs.graphs == once
        assert layers.path == "compiled", layers.reason
