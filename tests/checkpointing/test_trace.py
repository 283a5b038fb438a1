"""Bytes that layers keep are predicted from passes over a few tokens."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from decoder_material import installed, run_decoder
from model_material import vision_model
from offload_material import enable, make
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.checkpointing.budget import largest_dense
from fastpack_trl.checkpointing.plan import LayerCost, Level, layer_levels
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches, storage_of, storages_saved
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.recipe.forecast import _kind_of
from fastpack_trl.testing import tiny_model


def costs_of(model: Any, *, ours: bool, **more: Any) -> list[LayerCost]:
    return layer_costs(model, checkpointable_layers(model), probe_batches(model), packs=ours, **more)


def counted(model: Any, documents: int, tokens: int, *, ours: bool) -> int:
    """Bytes that a forward pass of the layers keeps, without parameters and what is saved outside of them."""
    weights = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() and storage_of(tensor) not in weights:
            saved[storage_of(tensor)] = tensor.detach()
        return tensor.detach()

    layers = checkpointable_layers(model)
    keep, inputs = ([level] * len(layers) for level in (Level.KEEP, Level.CHECKPOINT))
    sizes = []
    with isolated_run(model, training=True):
        for levels in (keep, inputs):
            saved = {}
            with layer_levels(layers, levels), saved_tensors_hooks(pack, lambda tensor: tensor):
                run_decoder(model, documents, tokens, packed=ours)
            sizes.append(sum(each.untyped_storage().nbytes() for each in saved.values()))
    return sizes[0] - sizes[1]


@pytest.mark.parametrize(
    ("family", "lora", "ours"),
    [("llama", False, True), ("qwen3", True, True), ("gpt_oss", False, True), ("qwen3_moe", False, True),
     ("llama", False, False), ("gpt_oss", False, False)],
)  # fmt: skip
def test_predicted_bytes_are_within_a_tenth_of_the_counted_ones(family: str, lora: bool, ours: bool) -> None:
    """Counted: what a pass keeps of all layers more than it keeps of checkpointed ones, their inputs."""
    model = make(family, lora=lora, layers=2)
    with installed(model, ours=ours):
        costs = costs_of(model, ours=ours)
        for documents, tokens in ((1, 250), (1, 31)) + (((5, 50),) if ours else ()):
            row = documents * tokens
            assert [cost.per_input * row for cost in costs] == [row * 32 * 4] * 2
            predicted = sum(cost.at(row, tokens) - cost.per_input * row for cost in costs)
            assert predicted == pytest.approx(counted(model, documents, tokens, ours=ours), rel=0.1)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "mistral3", "llava", "internvl", "qwen2_audio"])
def test_beside_a_tower_the_layers_of_the_decoder_are_counted(family: str) -> None:
    """A row of text runs none of the tower's layers."""
    model, ours = vision_model(family), family != "qwen2_audio"  # which is not packed
    with installed(enable(model), ours=ours):
        costs = costs_of(model, ours=ours)
        predicted = sum(cost.at(200, 200) - cost.per_input * 200 for cost in costs)
        assert predicted == pytest.approx(counted(model, 1, 200, ours=ours), rel=0.1)
    assert len(costs) == model.config.get_text_config().num_hidden_layers


def test_weights_that_a_layer_gets_as_it_runs_are_no_activations() -> None:
    layer = nn.Linear(8, 8)  # FSDP 2 gathers its weights so
    layer.register_forward_pre_hook(lambda *_: setattr(layer, "weight", nn.Parameter(torch.ones(8, 8), False)))
    with storages_saved(layer, set()) as saved:
        layer(torch.ones(3, 8, requires_grad=True)).sin()
    assert [storage.nbytes() for storage in saved] == [3 * 8 * 4]


def test_passes_leave_no_tensor_and_no_hook_behind() -> None:
    """A graph would keep activations, and the nodes of parameters to a stream that is not a capture's."""
    model, made = make("llama", lora=True, layers=2), []
    layer = checkpointable_layers(model)[1]
    layer.mlp.register_forward_hook(lambda *_: pytest.fail("a hook of the user ran"))
    forward = type(layer.mlp).forward

    def watched(hidden: Tensor) -> Tensor:
        made.append(weakref.ref(out := forward(layer.mlp, hidden)))
        return out

    layer.mlp.forward = watched
    state = torch.get_rng_state()
    gc.disable()
    try:
        with installed(model):
            costs_of(model, ours=True)
        assert [each() for each in made] == [None] * 3
    finally:
        gc.enable()
    assert torch.equal(torch.get_rng_state(), state)
    hooks = model.get_input_embeddings()._forward_hooks.values()
    assert {getattr(hook, "__name__", "") for hook in hooks} <= {"make_inputs_require_grads"}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "lora", "taken"),
    [
        ("qwen3", True, [3]),
        ("gemma2", True, [2, 3]),  # windows in every second layer
        ("deepseek_v3", False, [0, 3]),  # the first layer has no experts
    ],
)
def test_one_layer_of_each_kind_says_what_all_say(family: str, lora: bool, taken: list[int]) -> None:
    model = make(family, lora=lora)
    layers = checkpointable_layers(model)
    with installed(model):
        last = {_kind_of(layer): index for index, layer in enumerate(layers)}
        stand_ins = [last[_kind_of(layer)] for layer in layers]
        every, few = costs_of(model, ours=True), costs_of(model, ours=True, stand_ins=stand_ins)
    assert sorted(last.values()) == taken
    for mine, real in zip(few, every, strict=True):
        # Routing differs with fewer layers before: experts are padded to whole tiles.
        exact = family != "deepseek_v3"
        assert mine == real if exact else mine.at(500, 500) == pytest.approx(real.at(500, 500), rel=0.1)


def test_kinds_tell_adapters_and_frozen_weights() -> None:
    model = make("qwen3", lora=True, layers=3)
    layers = checkpointable_layers(model)
    assert _kind_of(layers[0]) == _kind_of(layers[1]) == _kind_of(layers[2])
    layers[1].self_attn.q_proj.lora_A["default"].weight.requires_grad_(False)
    assert _kind_of(layers[1]) != _kind_of(layers[0])


def test_the_largest_4_bit_weight_is_found_as_it_is_once_made_dense() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_model("qwen3_moe").requires_grad_(False)
    assert largest_dense(model) == 0
    from fastpack_trl.moe.quantized import quantize_experts

    experts = model.model.layers[0].mlp.experts
    shape, width = experts.gate_up_proj.shape, experts.gate_up_proj.element_size()
    quantize_experts(model)
    assert largest_dense(model) == shape.numel() * width
    linear = bitsandbytes.nn.Linear4bit(512, 1024, compute_dtype=torch.bfloat16, quant_type="nf4")
    linear.weight = bitsandbytes.nn.Params4bit(torch.randn(1024, 512, dtype=torch.bfloat16), requires_grad=False)
    assert largest_dense(linear.to("cpu")) == 1024 * 512 * 2


def test_no_more_positions_than_the_model_has_are_run() -> None:
    """A table of learned positions ends the process of a device that is asked for more."""
    few, many = (costs_of(tiny_model("opt", max_position_embeddings=count), ours=True) for count in (48, 512))
    assert [cost.per_input for cost in few] == [cost.per_input for cost in many]
