"""Evaluation of 4-bit models on a CPU leaves weights that train: bitsandbytes packs them without a backward."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_material import any_ids, quantized
from trainer_material import build, figures

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.precision import four_bit_layout

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(
    not getattr(bnb.nn.Linear4bit(1, 1), "support_avx512bf16_for_cpu", False), reason="a CPU with AVX-512 and bf16"
)


def packed(model: Any) -> int:
    states = [module.weight.quant_state for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert states
    return sum(getattr(state, "packing_format_for_cpu", False) for state in states)


@pytest.mark.parametrize("lora", ["auto", "off"])
def test_evaluation_leaves_weights_that_train_unless_others_packed_them(lora: str, tmp_path: Path) -> None:
    norms = []
    for strategy in ("no", "steps"):
        trainer: Any = build(FastSFTTrainer, tmp_path, model=quantized(), eval_strategy=strategy, eval_steps=1)
        trainer.args.lora = lora
        if strategy == "steps":
            trainer.evaluate()
        trainer.train()
        assert packed(trainer.model) == 0
        norms.append([row["grad_norm"] for row in figures(trainer) if "grad_norm" in row])
    assert norms[0] == norms[1]
    with torch.no_grad():
        with four_bit_layout(SimpleNamespace(model=trainer.model.eval(), training=True)):
            trainer.model(input_ids=any_ids())
        assert packed(trainer.model) == 0
        trainer.model(input_ids=any_ids())  # as bitsandbytes does outside of the trainer
    assert packed(trainer.model) == 14
    with pytest.raises(ValueError, match="4-bit weights of 14 layers for inference, where they have no backward"):
        trainer.train()
    trainer.evaluate()
