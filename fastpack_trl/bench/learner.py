"""Time only the learner of trainers that generate: completions and rewards are random, and the same on all sides.

Sampled tokens depend on the last bits of the weights, so two sides would soon train on different tokens. Generation
takes the same time on both.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.model.changes import patch_attribute

SHORTEST = 0.15
"""The shortest completion, of ``max_completion_length``."""


@contextlib.contextmanager
def learner_alone(trainer: Any) -> Iterator[None]:
    """Draw the completions and rewards of a GRPO or RLOO trainer, by its seed and step.

    Completions have from 15 % to all of ``max_completion_length`` tokens, drawn evenly, and end as finished ones do.
    """
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    words = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    longest = trainer.args.max_completion_length
    least = max(1, round(SHORTEST * longest))
    # GRPO's returns log-probabilities of its engine too.
    has_more = "num_generations" in inspect.signature(trainer._generate_single_turn).parameters

    def draw(kind: str) -> random.Random:
        return random.Random(f"{kind} {trainer.args.seed} {trainer._step}")

    def generate(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        drawn = draw("completions")
        lengths = [drawn.randint(least, longest) for _ in prompt_ids]
        made = [[*drawn.choices(words, k=length - 1), tokenizer.eos_token_id] for length in lengths]
        return (made, None) if has_more else made

    def rewards(_inputs: Any, prompts: Any, *_: Any) -> Tensor:
        drawn = draw("rewards")
        made = [[drawn.random() for _ in trainer.reward_funcs] for _ in prompts]
        return torch.tensor(made, device=trainer.accelerator.device)

    generated = patch_attribute(trainer, "_generate_single_turn", generate)
    with generated, patch_attribute(trainer, "_calculate_rewards", rewards):
        yield
