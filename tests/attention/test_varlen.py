"""`varlen`: everything around torch's flash kernel on the CPU (through its twin), and the kernel itself on CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_material import HOPPER, SCALE, make_inputs, prepared
from torch import Tensor

from fastpack_trl.attention import varlen
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import tiny_model

LENGTHS = (1, 7, 20, 2)
# torch 2.11 (the oldest supported) and 2.13 share these; later ones only add keywords with defaults.
FORWARD = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
    "is_causal", "rng_state", "unused",
)  # fmt: skip


def test_a_row_that_int32_cannot_index_is_refused() -> None:
    features = replace(HOPPER, num_heads=64, head_dim=128)
    fits = 2**31 // (64 * 128) - 128 - 1
    assert varlen.can_index(fits, varlen.elements_per_token(features))
    with pytest.raises(ValueError, match=r"too long for varlen's int32 backward: set packed_attention="):
        prepared("varlen", PackedBatch.from_lengths((fits + 2,)), features=features)


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
