"""Evaluation of 4-bit models on a CPU leaves weights that train: bitsandbytes packs them without a backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import any_ids
from quantised_material import quantised
from trainer_material import build, figures

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.precision import not_packed_on_cpu

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(
    not getattr(bnb.nn.Linear4bit(1, 1), "support_avx512bf16_for_cpu", False), reason="a CPU with AVX-512 and bf16"
)


def packed(model: Any) -> int:
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert layers
    return sum(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)


def gradient_norms(trainer: Any) -> list[float]:
    return [row["grad_norm"] for row in figures(trainer) if "grad_norm" in row]


@pytest.mark.parametrize("lora", ["auto", "off"])
def test_a_run_that_evaluates_trains_as_one_that_does_not(lora: str, tmp_path: Path) -> None:
    plain, evaluating = (
        build(FastSFTTrainer, tmp_path, model=quantised(), eval_strategy=strategy, eval_steps=1)
        for strategy in ("no", "steps")
    )
    for trainer in (plain, evaluating):
        trainer.args.lora = lora  # type: ignore[attr-defined]
    plain.train()
    evaluating.evaluate()
    assert packed(evaluating.model) == 0
    evaluating.train()
    assert packed(evaluating.model) == 0
    assert gradient_norms(evaluating) == gradient_norms(plain)


def test_weights_that_others_packed_are_not_trained(tmp_path: Path) -> None:
    trainer: Any = build(FastSFTTrainer, tmp_path, model=quantised(), eval_strategy="no", max_steps=1)
    with torch.no_grad():
        trainer.model.eval()(input_ids=any_ids())
    assert packed(trainer.model) == 14
    with pytest.raises(ValueError, match="4-bit weights of 14 layers for inference, where they have no backward"):
        trainer.train()
    trainer.evaluate()


def test_outside_of_the_trainer_bitsandbytes_packs_as_it_does() -> None:
    model = quantised().eval()
    with torch.no_grad(), not_packed_on_cpu(model, training=True):
        model(input_ids=any_ids())
    assert packed(model) == 0
    with torch.no_grad():
        model(input_ids=any_ids())
    assert packed(model) == 14
