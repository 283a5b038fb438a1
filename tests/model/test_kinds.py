"""Layers of one kind are alike in all that decides how they mix tokens; a check of one of each finds what differs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import peft
import pytest
import torch
from odd_models import Around, Mean, Shift
from torch import nn

from fastpack_trl import apply_lora
from fastpack_trl.features.verify_packing import verify_kinds
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.model.kinds import Kinds, first_of_kind, one_of_each_kind
from fastpack_trl.testing import tiny_model

TYPES = ["sliding_attention", "full_attention"] * 3


def adapted(family: str = "qwen3", **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "o_proj"], **options}
    return peft.get_peft_model(tiny_model(family, num_hidden_layers=6), peft.LoraConfig(**options))


def kinds(model: Any) -> list[int]:
    return first_of_kind(model, checkpointable_layers(model))


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("gemma2", {"layer_types": TYPES}, [0, 1, 0, 1, 0, 1]),
        ("starcoder2", {}, [0] * 6),
        ("deepseek_v3", {}, [0] + [1] * 5),
    ],
)
def test_layers_of_a_family_are_of_few_kinds_also_after_they_ran(family: str, fields: Any, expected: list[int]) -> None:
    model = tiny_model(family, num_hidden_layers=6, **fields)
    assert kinds(model) == expected
    model(input_ids=torch.ones(1, 3, dtype=torch.long))  # transformers puts hooks on them
    assert kinds(model) == expected


def test_adapters_make_a_kind_of_their_own_before_and_after_they_are_fast() -> None:
    for options, expected in (
        ({}, [0] * 6),
        ({"layers_to_transform": [1, 4]}, [0, 1, 0, 0, 1, 0]),
        ({"rank_pattern": {"layers.2.self_attn.q_proj": 4}}, [0, 0, 2, 0, 0, 0]),
        ({"alpha_pattern": {"layers.2.self_attn.q_proj": 4}}, [0, 0, 2, 0, 0, 0]),
    ):
        model = adapted(**options)
        assert kinds(model) == expected, options
        apply_lora(model)
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
        assert kinds(model) == expected, options


def without_mask(inner: nn.Module) -> nn.Module:
    class Open(Around):
        attention_type = "full_attention"

        def forward(self, hidden: Any, **kwargs: Any) -> Any:
            return self.layer(hidden, **kwargs | {"attention_mask": None, "position_ids": None})

    return Open(inner)


def summed(forward: Any, hidden: torch.Tensor) -> Any:
    return forward(hidden).cumsum(1)


CHANGES: dict[str, Any] = {
    "forward": lambda layer: setattr(layer.mlp, "forward", partial(summed, layer.mlp.forward)),
    "class": lambda layer: setattr(layer, "mlp", Shift(layer.mlp)),
    "zero gate": lambda layer: setattr(layer, "mlp", Mean(layer.mlp)),
    "inside": lambda layer: setattr(layer.mlp, "act_fn", Shift(layer.mlp.act_fn)),
}
HARMLESS: dict[str, Any] = {
    "hook": lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
    "scalar": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "window": lambda layer: setattr(layer.self_attn, "_fastpack_window", 7),
    "frozen": lambda layer: layer.mlp.up_proj.requires_grad_(False),
    "dtype": lambda layer: layer.mlp.up_proj.double(),
    "zero": lambda layer: layer.mlp.up_proj.weight.data.zero_(),
}


@pytest.mark.parametrize("change", [*CHANGES, *HARMLESS])
def test_a_layer_that_differs_is_a_kind_of_its_own_and_its_leak_is_found(change: str) -> None:
    model = tiny_model("qwen3", num_hidden_layers=6)
    (CHANGES | HARMLESS)[change](model.model.layers[4])
    assert kinds(model) == [0, 0, 0, 0, 4, 0]
    if change in CHANGES:
        assert len(verify_kinds(model, Kinds(model)).leaks) >= 3


def test_a_layer_that_is_called_with_another_mask_runs() -> None:
    model = tiny_model("qwen3", num_hidden_layers=6)
    assert verify_kinds(model, Kinds(model), implementation="off").proven
    model.model.layers[4] = without_mask(model.model.layers[4])
    assert kinds(model) == [0] * 6, "the layer inside is like the others"
    assert verify_kinds(model, Kinds(model), implementation="off").leaks
    model.model.layers[5].mlp.up_proj.weight.data[0, 0] = math.nan
    with one_of_each_kind(Kinds(model)) as skipped:
        assert not skipped, "a forward pass of all names what is not finite"


def test_one_layer_of_each_kind_runs_and_all_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = tiny_model("gpt_oss", num_hidden_layers=6, layer_types=TYPES), set[int]()
    layers = list(model.model.layers)
    cls, stock = type(layers[0].self_attn), type(layers[0].self_attn).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.add(self.layer_idx)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", forward)
    assert verify_kinds(model, Kinds(model)).proven
    assert ran == {0, 1}
    assert verify_kinds(model, Kinds(model), implementation="off").leaks
    assert not any("forward" in vars(layer) for layer in layers)
