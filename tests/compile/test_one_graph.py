"""Layers of one kind share one graph, and so do rows of every form: each further graph is seconds of a first step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from compile_material import Counting, make
from peft import LoraConfig, get_peft_model
from static_material import bucket_for, make_rows, to_static

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.moe.feature import apply_moe

EXPERTS = ("gpt_oss", "qwen3_moe")


def adapted(family: str) -> Any:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=4, target_modules=targets + ([] if family in EXPERTS else ["gate_proj", "up_proj", "down_proj"]),
        target_parameters=experts if family in EXPERTS else None, init_lora_weights=False,
    )  # fmt: skip
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family in ("gemma3_text", "gpt_oss") else {}
    return get_peft_model(make(family, num_hidden_layers=4, **kinds), config).train()


@contextlib.contextmanager
def compiled(model: Any, backend: str) -> Any:
    graphs = Counting()
    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model, backend))
        stack.enter_context(apply_moe(model))
        stack.callback(apply_lora(model).revert)
        layers = stack.enter_context(compiled_layers(model, verbose=False, _backend=graphs))
        yield graphs, layers


def run(model: Any, inputs: Any) -> None:
    model(**inputs, use_cache=False).logits.sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_merged_and_static_rows_run_the_graph_of_the_plain_ones(family: str) -> None:
    model = adapted(family)
    with compiled(model, "varlen") as (graphs, layers):
        plain, merged = make_rows([[7, 9]]), make_rows([[7, 9], [4, 6, 8]])
        run(model, plain)
        once = graphs.graphs
        assert once == len(layers.kinds)
        run(model, merged)
        run(model, to_static(plain, bucket_for(plain, tail=20, segments=3)).keywords)
        run(model, to_static(merged, bucket_for(merged, tail=9, segments=5)).keywords)
        assert graphs.graphs == once
        assert layers.path == "compiled", layers.reason


def test_the_rank_of_adapters_and_the_widths_of_the_model_are_constants_of_the_graph() -> None:
    model = adapted("llama")
    symbols: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [size for value in made for size in getattr(value, "shape", ())]
        symbols.extend(sorted({str(size) for size in sizes if not isinstance(size, int)}))
        return graph.forward

    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model, "varlen"))
        stack.callback(apply_lora(model).revert)
        stack.enter_context(compiled_layers(model, verbose=False, _backend=backend))
        run(model, make_rows([[7, 9]]))
    assert len(symbols) == 2, symbols  # the tokens of the row, and the length of `cu_seqlens`
