"""Whole runs of DPO, GRPO and RLOO in random settings, with TRL's: ``python tests/support/random_pairs_runs.py``.

Each number is a setting of DPO and one of GRPO or RLOO, with a rotation and the length at which it changes. Both
trainers begin with the same weights; logs and weights are compared. `test_random_runs.py` has a sample.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import random_runs
import side_by_side
import torch
from preference_material import build, own_error, pairs, prompts
from trainer_material import figures
from transformers import AutoConfig, AutoModelForCausalLM

import fastpack_trl
from fastpack_trl.testing import _COMMON, FAMILIES, tiny_model

ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 2.0}, "dynamic": {"factor": 3.0}, "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 6.0, 9.0]},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "scaled": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.5},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5}, "per layer": {},
}  # fmt: skip
"""Fields of ``rope_parameters``. ``scaled``: attention is scaled by position; ``per layer``: dynamic in every other."""
COMMON = ("llama", "qwen3", "mistral", "gemma2", "olmo2", "qwen3_moe", "granite", "cohere2")
OF = {
    "scaled": ("ministral3",),
    "partial": ("phi3", "glm4"),
    "per layer": ("gemma3_text",),
    "longrope": ("phi3", *COMMON),
}
"""Families that have a rotation; those of `COMMON` have the others."""


def model(family: str, rotation: str, switch: int, seed: int = 0) -> Any:
    """A tiny model whose rotation changes at `switch` tokens."""
    rope: dict[str, Any] = {"rope_type": rotation, "rope_theta": 1e4, **ROTATIONS[rotation]}
    if rotation == "per layer":
        rope = {"full_attention": rope | {"rope_type": "dynamic", "factor": 3.0}}
        rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e3}
    elif rotation in ("yarn", "longrope", "llama3", "scaled"):
        rope["original_max_position_embeddings"] = switch
    more = {"rope_parameters": rope, "max_position_embeddings": switch if "dynamic" in str(rope) else 128}
    more |= {"original_max_position_embeddings": switch} if rotation == "longrope" and family == "phi3" else {}
    if family in FAMILIES:
        return tiny_model(family, seed=seed, **more)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_COMMON, "head_dim": 8, **more})).float()


def draw(kind: str, number: int) -> dict[str, Any]:
    """Return the setting of a number for ``DPO`` or ``online``; the same in every process and version of Python."""
    chosen = random.Random(f"{kind} {number}")
    pick = chosen.choice
    name = kind if kind == "DPO" else pick(["GRPO", "RLOO"])
    rotation, batch = pick([*ROTATIONS, "dynamic", "longrope", "longrope"]), pick([2, 4])
    micro_batches, beta = pick([1, 2, 4]), pick([0.0, 0.05, 0.2])
    stock: dict[str, Any] = {
        "gradient_accumulation_steps": micro_batches, "beta": beta, "per_device_train_batch_size": batch,
        "learning_rate": pick([0.0, 1e-3, 1e-3]), "gradient_checkpointing": pick([True, False]),
        "max_grad_norm": pick([1.0, 0.0]), "eval_strategy": pick(["no", "steps"]), "max_steps": pick([3, 4]),
        "pad_to_multiple_of": pick([None, None, 8]), "seed": chosen.randrange(99),
    }  # fmt: skip
    fast = {"share_prefixes": pick(["auto", "auto", "off"])}
    if kind == "DPO":
        divides = ["ipo", "robust", "sppo_hard"] if beta else []  # by beta
        stock |= {"loss_type": pick(["sigmoid", "hinge", *divides]), "label_smoothing": 0.1 if beta else 0.0}
        stock |= {"precompute_ref_log_probs": pick([True, False]), "precompute_ref_batch_size": pick([None, 3])}
    else:
        stock |= {"steps_per_generation": pick([None, micro_batches * 2, 4]), "num_iterations": pick([1, 1, 2])}
        stock |= {"max_completion_length": pick([6, 14]), "num_generations": pick([2, batch])}
        fast["merge_accumulation"] = pick(["auto", "auto", "off"])
    if name == "GRPO":
        stock |= {"loss_type": pick(["dapo", "grpo"]), "importance_sampling_level": pick(["token", "sequence"])}
    return {
        "name": name, "rotation": rotation, "switch": pick([16, 24, 40, 64]), "family": pick(OF.get(rotation, COMMON)),
        "lora": pick([True, True, False]), "runs": pick([1, 1, 1, 2]), "stock": stock, "fast": fast,
    }  # fmt: skip


def run(fast: bool, folder: Path, chosen: dict[str, Any]) -> Any:
    """Train as a setting says, some trainers twice."""
    name, options = chosen["name"], dict(chosen["stock"])
    if fast:
        options |= chosen["fast"] | {"config": getattr(fastpack_trl, f"Fast{name}Config")}
    made, reference = (model(chosen["family"], chosen["rotation"], chosen["switch"], seed) for seed in (0, 1))
    compares = name == "DPO" and not chosen["lora"] and not options["precompute_ref_log_probs"]
    options |= {"trainer": {"ref_model": reference} if compares else None, "eval_steps": 2, "lora": chosen["lora"]}
    torch.manual_seed(0)
    data = pairs(24, prompt=36) if name == "DPO" else prompts(24)
    trainer = build(name, folder, fast=fast, model=made, data=data, **options)
    for _ in range(chosen["runs"]):
        trainer.train()
    return trainer


def compare(number: int) -> dict[str, Any]:
    """Run both settings of a number with both trainers; return what differs: a figure, a weight."""
    settings, found = [draw(kind, number) for kind in ("DPO", "online")], list[str]()
    for chosen in settings:
        with tempfile.TemporaryDirectory() as folder:
            ours, stock = (run(fast, Path(folder) / str(fast), chosen) for fast in (True, False))
        chosen["batches"] = str(ours.fastpack_report["batches"])
        found += [side_by_side.difference(figures(ours), figures(stock), random_runs.RTOL, random_runs.ATOL, own_error)]
        weights = zip(ours.model.named_parameters(), stock.model.parameters(), strict=True)
        apart = {name: float((mine - theirs).detach().abs().max()) for (name, mine), theirs in weights}
        found += [f"{name}: {most:.1e} apart" for name, most in apart.items() if most > 10 * random_runs.ATOL]
    return {"number": number, "differs": "; ".join(filter(None, found)), "error": "", "settings": settings}


if __name__ == "__main__":
    sys.exit(random_runs.main(compare, count=60))
