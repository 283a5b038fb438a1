"""The packing check sees branches behind tensors that are zero before training, and leaves those as they were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from odd_models import Mean, model_with
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, apply_lora, verify_packing
from fastpack_trl.attention.small_copy import small_copy
from fastpack_trl.errors import PackingError
from fastpack_trl.model.changes import zeros_perturbed
from fastpack_trl.testing import tiny_model

STEEP = {"learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 1e9, "gradient_accumulation_steps": 2, "max_steps": 3}


def adapted(config: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    return peft.get_peft_model(tiny_model("qwen3"), config(**options))


MIXING: dict[str, Any] = {
    "lily": partial(adapted, peft.LilyConfig, r=4), "mean": partial(model_with, Mean),
    "sums": partial(model_with, partial(Mean, sums=True)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXING)
def test_branch_behind_a_zero_gate_leaks_before_it_is_trained(kind: str) -> None:
    model = MIXING[kind]()
    assert len(verify_packing(model).leaks) >= 6
    if kind == "lily":  # it stands for a model whose parameters are in other processes
        with small_copy(model, torch.device("cpu"), None) as copy:
            assert verify_packing(copy).leaks
    assert verify_packing(model.requires_grad_(False)).proven, "a frozen gate stays closed"


@pytest.mark.parametrize(
    ("config", "options"),
    [
        *((peft.LoraConfig, options) for options in ({}, {"use_dora": True}, {"bias": "all"})),
        *((config, {}) for config in (partial(peft.VeraConfig, r=4), partial(peft.OFTConfig, oft_block_size=8))),
    ],
)
def test_adapters_that_start_at_zero_and_mix_no_tokens_pass(config: Any, options: dict[str, Any]) -> None:
    model = adapted(config, **options)
    assert any(not parameter.any() for parameter in model.parameters() if parameter.requires_grad)
    apply_lora(model)
    model(input_ids=torch.arange(5, 15)[None])
    casts = [vars(module).get("fastpack_cast") for module in model.modules()]
    assert verify_packing(model).proven
    for module, cast in zip(model.modules(), casts, strict=True):
        assert vars(module).get("fastpack_cast") is cast, "one of the perturbed values would serve later calls"


def test_every_tensor_is_restored_bit_by_bit_also_after_an_exception() -> None:
    model = MIXING["lily"]()
    zeros = [parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.any()]
    with torch.no_grad():
        zeros[0].neg_()  # -0.0 is zero too
        zeros[-1].set_(zeros[0].data)  # two parameters of one memory
    before = [(p, p.detach().clone().view(torch.int32), p._version) for p in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(KeyError), zeros_perturbed(model):
        assert all(parameter.all() for parameter in zeros)
        raise KeyError
    assert not verify_packing(model).proven
    for parameter, bits, version in before:
        assert torch.equal(parameter.detach().view(torch.int32), bits)
        assert (parameter._version, parameter.grad) == (version, None)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "packing", "rows"),
    [*((one, packing, "stock") for one in ("lily", "mean") for packing in (True, False)), ("sums", True, "documents")],
)
def test_rows_are_trls_unless_padding_separates_documents(kind: str, packing: bool, rows: str, tmp_path: Path) -> None:
    ours = train(FastSFTTrainer, tmp_path, model=MIXING[kind](), packing=packing, **STEEP)
    report = ours.fastpack_report
    assert report["batches"].path == rows
    # The loss of documents is right, and that of packed rows under TRL is not.
    assert ("stock loss" in report.facts) == (rows == "documents")
    if rows == "stock":
        failed = "padded_documents" if packing else "per_document"
        assert f"{failed} failed its packing check: " in report["batches"].reason
        assert_same_log(ours, train(SFTTrainer, tmp_path, model=MIXING[kind](), packing=packing, **STEEP))
        ours.train()  # TRL's rows are not checked: none are better
        assert ours.fastpack_run.plan.kind == "stock"
    if rows == "stock" and packing:
        ours.args.verify_packing = "on"
        for _ in range(2):
            with pytest.raises(PackingError, match="LEAK"):
                ours.train()
