"""Every family in bf16 autocast over fp32 weights, as TRL trains: packed is as near to float64 as separate stock is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_material import LENGTHS, PER_DOCUMENT, packed, separate
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import tiny_model

# With all experts chosen no token changes its experts for a rounding, which would move its loss by far more than one.
MOE = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "afmoe", "granitemoehybrid", "qwen3_next")
ALL_EXPERTS = {**{family: {"num_experts_per_tok": 4} for family in MOE}, "llama4_text": {"num_experts_per_tok": 2}}
SOFTCAPPED = ("gemma2",)  # varlen has none
SEEDS = 4
# One rounding of the result: the mean loss of 26 tokens is too short a sum for its errors to average out.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


def relative_errors(loss: float, grads: dict[str, Tensor], exact: tuple[float, dict[str, Tensor]]) -> Tensor:
    """Of the loss, and of all gradients together in the 2-norm."""
    expected_loss, expected = exact
    assert grads.keys() == expected.keys()
    distance = sum(float((grads[name].double().cpu() - g).square().sum()) for name, g in expected.items()) ** 0.5
    size = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    return torch.tensor([abs(loss - expected_loss) / abs(expected_loss), distance / size])


def expected_path(family: str, device: str) -> str:
    return "varlen" if device == "cuda" and family not in SOFTCAPPED else "per_document"


def compare(family: str, device: str) -> None:
    model = tiny_model(family, **ALL_EXPERTS.get(family, {}))
    if family in ALL_EXPERTS and getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # grouped matrix products know no float64
    exact_model = copy.deepcopy(model).double()
    model.to(device)
    ours, stock = [], []
    for seed in range(SEEDS):
        ids = torch.randint(3, 96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
        batch = PackedBatch.from_lengths(LENGTHS, labels=ids)
        exact = separate(exact_model, ids, batch)
        ids, batch = ids.to(device), batch.to(device)
        with torch.autocast(device, torch.bfloat16):
            stock.append(relative_errors(*separate(model, ids, batch), exact))
        actual = packed_step(model, ids, batch, expected_path(family, device), device)
        ours.append(relative_errors(*actual, exact))
    mean_error, mean_budget = (torch.stack(rows).square().mean(0).sqrt() for rows in (ours, stock))
    assert (mean_error <= 2 * mean_budget + ROUNDING).all(), (mean_error, mean_budget)


def packed_step(model: Any, ids: Tensor, batch: PackedBatch, path: str, device: str) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with packed_attention(model, compute_dtype=torch.bfloat16) as attention:
        assert attention.path == path, attention.choice.reason
        with torch.autocast(device, torch.bfloat16):
            loss = packed(model, ids, batch)
        loss.backward()
    return loss.item(), {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", PER_DOCUMENT)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_packed_within_twice_the_error_of_separate_documents(device: str, family: str) -> None:
    compare(family, device)
