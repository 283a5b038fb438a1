"""Trainers that score completions, ours and stock's, on small data of their kinds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from model_material import away_from_zero
from peft import LoraConfig
from side_by_side import assert_equal
from torch import Tensor, nn
from trainer_material import figures, make_tokenizer, sentences, settings

import fastpack_trl
from fastpack_trl.testing import tiny_model

NAMES = ("DPO", "KTO", "Reward", "GRPO", "RLOO")
ABSOLUTE = {"rewards/": 2e-5, "kl": 2e-5, "logits/": 3e-5, "margin": 2e-5, "_reward": 2e-5}
"""Figures that are differences of large sums, or means near zero: part of their key, and the error that is theirs."""


def prompts(count: int = 20, seed: int = 0) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{text} " for text in sentences(count, seed, 40)]})


def pairs(count: int = 20, seed: int = 0, prompt: int = 40, answer: int = 12) -> Dataset:
    texts: dict[str, list[str]] = {"prompt": [f"{text} " for text in sentences(count, seed, prompt)]}
    texts |= {"chosen": sentences(count, seed + 1, answer), "rejected": sentences(count, seed + 2, answer)}
    return Dataset.from_dict(texts)


def judged(count: int = 20, seed: int = 0) -> Dataset:
    asked = [f"{text} " for text in sentences(count // 2, seed, 40) for _ in range(2)]
    answers = {"completion": sentences(count, seed + 1, 12), "label": [True, False] * (count // 2)}
    return Dataset.from_dict({"prompt": asked, **answers})


def even_words(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward function."""
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit())) for text in completions]


def classifier(family: str = "qwen3", model: Any = None) -> Any:
    """A tiny model with a head of one score, of the config of `model` if there is one."""
    from transformers import AutoModelForSequenceClassification

    config = (model or tiny_model(family)).config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).float()


ONLINE: dict[str, Any] = {"max_length": None, "num_generations": 4, "max_completion_length": 8}
ONLINE |= {"per_device_eval_batch_size": 4}
DATA: dict[str, Callable[..., Dataset]] = {
    "DPO": pairs, "KTO": judged, "Reward": pairs, "GRPO": prompts, "RLOO": prompts,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {"GRPO": ONLINE, "RLOO": ONLINE}


def build(
    name: str, folder: Path, *, fast: bool, family: str = "qwen3", lora: bool = True, model: Any = None,
    data: Any = None, evaluated: Any = None, trainer: dict[str, Any] | None = None, config: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """A trainer for a short run.

    Args:
        name: of `NAMES`.
        fast: ours.
        model: None for a tiny one of `family`.
        config: a class; default: TRL's.
        trainer: arguments of the trainer.
        more: fields of its config; None leaves one out.
    """
    base = settings(folder, **{"max_steps": 5, "eval_steps": 5, **FIELDS.get(name, {}), **more})
    args = (config or getattr(trl, f"{name}Config"))(**{key: value for key, value in base.items() if value is not None})
    made = model if model is not None else classifier(family) if name == "Reward" else tiny_model(family)
    given: dict[str, Any] = {
        "train_dataset": DATA[name]() if data is None else data,
        "eval_dataset": DATA[name](8, seed=7) if evaluated is None else evaluated,
        "processing_class": make_tokenizer(),
        "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]) if lora else None,
    }
    if name in ("GRPO", "RLOO"):
        given["reward_funcs"] = even_words
        if not lora and getattr(args, "beta", 0.0):
            name_on_disk(made, folder)
    elif name in ("DPO", "KTO") and not lora and not args.precompute_ref_log_probs:
        given["ref_model"] = tiny_model(family)
    cls = getattr(fastpack_trl, f"Fast{name}Trainer") if fast else getattr(trl, f"{name}Trainer")
    made = cls(made, args=args, **given | (trainer or {}))
    if lora:
        away_from_zero(made.model)
    return made


def name_on_disk(model: Any, folder: Path) -> None:
    """Save a model where a trainer finds it that loads its reference from where the model came from."""
    model.save_pretrained(folder / "model")  # of several processes the first one writes
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    model.config._name_or_path = str(folder / "model")


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def own_error(name: str) -> float:
    """The absolute error of a figure by its name."""
    return max((error for part, error in ABSOLUTE.items() if part in name), default=0.0)


def assert_same(ours: Any, stock: Any, rtol: float = 1e-5, atol: float = 2e-6) -> None:
    """The logs of two trainers are equal."""
    assert_equal(figures(ours), figures(stock), rtol, atol, own_error)


def both(
    name: str, folder: Path, options: Callable[[], dict[str, Any]] = dict, around: Any = nullcontext, **more: Any
) -> tuple[Any, Any]:
    """Ours and stock's after `train`, from the same weights on the same data; `weights_before` are on both.

    Args:
        options: makes what each of the two has to have of its own: models, tokenizers.
        around: a context that a trainer trains in.
    """
    made = []
    for fast in (True, False):
        runner = build(name, folder / str(fast), fast=fast, **more | options())
        runner.weights_before = trained(runner.model)
        with around(runner):
            runner.train()
        made.append(runner)
    return made[0], made[1]


def assert_changed_alike(ours: Any, stock: Any, within: float = 1e-4) -> None:
    """Two trainers of `both` have changed their weights, and alike."""
    mine, theirs, before = trained(ours.model), trained(stock.model), stock.weights_before
    changed = torch.cat([(theirs[key] - before[key]).flatten() for key in before])
    apart = torch.cat([(mine[key] - theirs[key]).flatten() for key in before])
    assert changed.norm() > 0
    assert apart.norm() <= within * changed.norm(), (apart.norm(), changed.norm())
