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
from trainer_material import make_tokenizer, settings
from transformers import TrainerCallback
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fastpack_trl import AsyncCheckpointCallback, FastSFTConfig, FastSFTTrainer
from fastpack_trl.checkpointing.streams import CudaStreams
from fastpack_trl.testing import assert_gradients_close, gradients

LENGTHS = (1, 13, 7, 20, 2)  # shorter and longer than the window of 5
COEFFICIENT = 0.3


def _model() -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_parameters=STACKS, target_modules=["q_proj", "o_proj"])
    return randomised(get_peft_model(moe_model("gpt_oss", attn_implementation="eager"), config))


def _documents() -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(5, 90, (length,)).tolist() for length in LENGTHS]


def _separate_documents() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step, each document by itself under stock's eager attention and experts."""
    model = _model()
    model.base_model.model.set_experts_implementation("eager")
    losses: list[Tensor] = []
    logits: list[tuple[Tensor, ...]] = []
    for document in _documents():
        ids = torch.tensor([document])
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        losses.append(F.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum"))
        logits.append(out.router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    loss = torch.stack(losses).sum() / (sum(LENGTHS) - len(LENGTHS))
    total = loss + COEFFICIENT * load_balancing_loss_func(layers, 4, 2)  # type: ignore[arg-type]
    total.backward()
    return float(total.detach()), gradients(model)


class _Gradients(TrainerCallback):
    """Keeps the gradients of the last step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = gradients(model)


@pytest.fixture(scope="module")
def separate() -> tuple[float, dict[str, Tensor]]:
    return _separate_documents()


@pytest.mark.parametrize(
    ("level", "streams"),
    [
        pytest.param("keep", None, id="plain"),
        pytest.param("off", None, id="checkpointed"),
        pytest.param("off", RecordingStreams, id="offloaded"),
        pytest.param("off", CudaStreams, id="offloaded-cuda", marks=pytest.mark.cuda),
    ],
)
def test_one_step_of_the_trainer_equals_separate_documents_under_stock_eager(
    tmp_path: Path, separate: tuple[float, dict[str, Tensor]], level: str, streams: Any
) -> None:
    on_cuda = streams is CudaStreams
    if on_cuda and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    caught = _Gradients()
    callbacks: list[TrainerCallback] = [caught]
    if streams is not None:  # every input, however small; on the CPU with streams that raise on what nothing orders
        make = CudaStreams if on_cuda else lambda device: RecordingStreams()
        offload = AsyncCheckpointCallback()
        offload._options = {"min_bytes": 1, "streams": make}
        callbacks.append(offload)
    args = settings(
        tmp_path, packing=True, max_length=sum(LENGTHS), max_steps=1, per_device_train_batch_size=1, eval_strategy="no",
        router_aux_loss_coef=COEFFICIENT, max_grad_norm=0.0, use_cpu=not on_cuda,
    )  # fmt: skip
    trainer = FastSFTTrainer(
        _model(), args=FastSFTConfig(**args, activation_memory=level),
        train_dataset=Dataset.from_dict({"input_ids": _documents()}), processing_class=make_tokenizer(),
        callbacks=callbacks,
    )  # fmt: skip
    trainer.train()
    report = trainer.fastpack_report
    assert report["packed_attention"].path == "per_document"
    assert "sinks" in report["packed_attention"].reason
    assert report["moe"].status == "on"
    assert "2 of 2 layers; LoRA on the experts of 2" in report["moe"].reason
    assert trainer.fastpack_proof is not None
    assert trainer.fastpack_proof.proven
    assert report["activation_memory"].path == ("stock" if level == "off" else level)
    assert trainer.args.gradient_checkpointing
    if streams is not None:
        use = callbacks[1].use  # type: ignore[attr-defined]
        assert use.most_held >= sum(LENGTHS) * 32 * 4  # the input of the first of two layers
        assert use.held == 0
    loss, expected = separate
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert any("experts" in name for name in expected)
    found = {name: value.cpu() for name, value in caught.found.items()}
    assert_gradients_close(found, expected, rtol=1e-4 if on_cuda else 2e-5)
