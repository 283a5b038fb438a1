"""gpt-oss with everything at once: packing, sinks, windows, expert LoRA, auxiliary loss, checkpointing, offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from moe_material import STACKS, moe_model, randomised
from peft import LoraConfig, get_peft_model
from recording_streams import RecordingStreams
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from trainer_material import callback, train
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fastpack_trl import AsyncCheckpointCallback, FastSFTTrainer
from fastpack_trl.testing import assert_gradients_close, gradients

LENGTHS = (1, 13, 7, 20, 2)  # shorter and longer than the window of 5
DOCUMENTS = [document.tolist() for document in torch.arange(sum(LENGTHS)).mul(37).remainder(85).add(5).split(LENGTHS)]
COEFFICIENT = 0.3


def _model() -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_parameters=STACKS, target_modules=["q_proj", "o_proj"])
    return randomised(get_peft_model(moe_model("gpt_oss", attn_implementation="eager"), config))


@pytest.fixture(scope="module")
def separate() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step, each document by itself under stock's eager attention and experts."""
    model = _model()
    model.base_model.model.set_experts_implementation("eager")
    losses, logits = [], []
    for document in DOCUMENTS:
        out = model(input_ids=torch.tensor([document]), use_cache=False, output_router_logits=True)
        losses.append(F.cross_entropy(out.logits[0, :-1], torch.tensor(document)[1:], reduction="sum"))
        logits.append(out.router_logits)
    layers: Any = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    loss = torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))
    total = loss + COEFFICIENT * load_balancing_loss_func(layers, 4, 2)
    total.backward()
    return float(total.detach()), gradients(model)


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize("how", ["keep", "checkpointed", "offloaded", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_step_of_the_trainer_equals_separate_documents_under_stock_eager(
    tmp_path: Path, separate: tuple[float, dict[str, Tensor]], how: str
) -> None:
    caught, offload = list[dict[str, Tensor]](), AsyncCheckpointCallback()
    if how != "cuda":  # with streams that raise on what nothing orders
        offload._options = {"streams": lambda device: RecordingStreams()}
    callbacks = [callback("on_pre_optimizer_step", lambda _, model: caught.append(gradients(model)))()]
    callbacks += [offload] if how in ("offloaded", "cuda") else []
    trainer = train(
        FastSFTTrainer, tmp_path, model=_model(), data=Dataset.from_dict({"input_ids": DOCUMENTS}), packing=True,
        max_length=sum(LENGTHS), max_steps=1, per_device_train_batch_size=1, eval_strategy="no", max_grad_norm=0.0,
        router_aux_loss_coef=COEFFICIENT, use_cpu=how != "cuda", trainer={"callbacks": callbacks},
        fast={"activation_memory": "keep" if how == "keep" else "off"},
    )  # fmt: skip
    report = trainer.fastpack_report
    assert report["packed_attention"].path == "per_document"
    assert "sinks" in report["packed_attention"].reason
    assert "2 of 2 layers; LoRA on the experts of 2" in report["moe"].reason
    assert trainer.fastpack_proof.proven
    assert report["activation_memory"].path == ("keep" if how == "keep" else "stock")
    if len(callbacks) > 1:
        assert offload.use.most_held >= sum(LENGTHS) * 32 * 4  # the input of the first of two layers
        assert offload.use.held == 0
    loss, expected = separate
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert any("experts" in name for name in expected)
    found = {name: value.cpu() for name, value in caught[0].items()}
    assert_gradients_close(found, expected, rtol=1e-4 if how == "cuda" else 2e-5)
