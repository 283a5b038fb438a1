"""Steps of trainers that generate: made-up completions and rewards, and a gate that sees another model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import build
from trainer_material import make_tokenizer

from fastpack_trl.bench.compare import LossParityError, compare_sides, losses_line, train_side
from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.sides import side_of
from fastpack_trl.recipe.methods import METHODS
from fastpack_trl.testing import tiny_model


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_what_is_made_up_is_that_of_the_step_and_gone_afterwards(tmp_path: Path, name: str) -> None:
    trainer = build(name, tmp_path, fast=False, max_completion_length=20)
    prompts: Any = [[5, 6, 7]] * 40
    own, made = dict(vars(trainer)), []
    with learner_alone(trainer):
        for trainer._step in (0, 0, 1):
            completions = trainer._generate_single_turn(prompts, None, {}, *[4] * (name == "GRPO"))
            completions = completions[0] if name == "GRPO" else completions  # without log-probabilities
            made.append((completions, trainer._calculate_rewards([], prompts, [], []).tolist()))
    assert made[0] == made[1]
    assert all(first != second for first, second in zip(made[0], made[2], strict=True))
    assert {len(each) for each in made[0][0]} <= set(range(3, 21))
    tokenizer = make_tokenizer()
    special = set(tokenizer.all_special_ids)
    assert all(each[-1] == tokenizer.eos_token_id and not special & set(each[:-1]) for each in made[0][0])
    assert {**vars(trainer), "_step": own["_step"]} == own


def test_the_gate_stops_a_learner_with_another_model(tmp_path: Path) -> None:
    """Its loss would not: advantages sum to zero, and the ratio of a model to itself is one."""

    def make(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        fast = trainer_class.__name__.startswith("Fast")
        options = {"config": config_class, "beta": 0.0, "bf16": False, **changes}
        trainer = build("GRPO", tmp_path, fast=fast, model=tiny_model("qwen3"), **options)
        if fast and is_wrong:
            with torch.no_grad():
                trainer.model.get_base_model().lm_head.weight.mul_(1.01)
        return trainer

    steps: Any = {"warmup": 1, "timed": 1, "gate": 1, "seed": 0}
    runs = {name: partial(train_side, make, side_of(name, METHODS["grpo"]), **steps) for name in ("stock", "fastpack")}
    is_wrong = False
    row = compare_sides(runs, rounds=1, gate=1, progress=False)
    assert row["gate"]["figure"] == "gradient norm"
    assert losses_line(row).startswith("completions and rewards are made up; gradient norms agree")
    is_wrong = True
    with pytest.raises(LossParityError, match="the gradient norm of step 1"):
        compare_sides(runs, rounds=1, gate=1, progress=False)
