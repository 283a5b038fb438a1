"""Whole runs of DPO, GRPO and RLOO in random settings, with TRL's: ``python tests/support/random_pairs_runs.py``.

Each number is one setting of DPO and one of GRPO or RLOO, the same at all times: a rotation and the length at which it
changes, a loss, what trains, accumulation, padding, generation. Both trainers begin with the same weights; logs and
weights are compared. `test_random_pairs_runs.py` has a sample.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import side_by_side
import torch
from model_material import away_from_zero
from preference_material import build, own_error, pairs, prompts
from random_runs import ATOL, RTOL, _quiet
from trainer_material import figures
from transformers import AutoConfig, AutoModelForCausalLM

import fastpack_trl
from fastpack_trl.testing import _COMMON, FAMILIES, tiny_model

COUNT = 60
KINDS = ("DPO", "online")
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 6.0, 9.0]},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "scaled": {"factor": 4.0, "llama_4_scaling_beta": 0.5},
    "partial": {"partial_rotary_factor": 0.5},
    "per layer": {},
}
"""Fields of ``rope_parameters``. ``scaled``: yarn with attention scaled by position; ``per layer``: two rotations."""
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
    kind = {"scaled": "yarn", "partial": "default"}.get(rotation, rotation)
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROTATIONS[rotation]}
    if kind in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = switch
    if rotation == "per layer":
        rope = {
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }
    more: dict[str, Any] = {
        "rope_parameters": rope,
        "max_position_embeddings": switch if "dynamic" in str(rope) else 128,
    }
    more |= {"original_max_position_embeddings": switch} if rotation == "longrope" and family == "phi3" else {}
    if family in FAMILIES:
        return tiny_model(family, seed=seed, **more)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_COMMON, "head_dim": 8, **more})).float()
    away_from_zero(made)
    return made.train()


def draw(kind: str, number: int) -> dict[str, Any]:
    """Return the setting of a number; the same in every process and version of Python."""
    chosen = random.Random(f"{kind} {number}")
    pick = chosen.choice
    rotation = pick([*ROTATIONS, "dynamic", "longrope", "longrope"])
    name = "DPO" if kind == "DPO" else pick(["GRPO", "RLOO"])
    stock: dict[str, Any] = {
        "per_device_train_batch_size": pick([2, 4]),
        "gradient_accumulation_steps": pick([1, 2, 4]),
        "learning_rate": pick([0.0, 1e-3, 1e-3]),
        "beta": pick([0.0, 0.05, 0.2]),
        "gradient_checkpointing": pick([True, False]),
        "max_grad_norm": pick([1.0, 0.0]),
        "eval_strategy": pick(["no", "steps"]),
        "pad_to_multiple_of": pick([None, None, 8]),
        "seed": chosen.randrange(99),
        "max_steps": pick([3, 4]),
    }
    fast = {"share_prefixes": pick(["auto", "auto", "off"])}
    if kind == "DPO":
        stock |= {
            "loss_type": pick(
                ["sigmoid", "hinge", "apo_zero", *(["ipo", "robust", "sppo_hard"] if stock["beta"] else [])]
            ),
            "label_smoothing": 0.1 if stock["beta"] else 0.0,
            "precompute_ref_log_probs": pick([True, False]),
            "precompute_ref_batch_size": pick([None, 3]),
            "max_length": pick([48, 40]),
        }
    else:
        generations, batch = pick([2, 4]), stock["per_device_train_batch_size"]
        stock |= {
            "num_generations": generations,
            "per_device_train_batch_size": max(batch, generations),
            "steps_per_generation": pick([None, stock["gradient_accumulation_steps"] * 2, 4]),
            "num_iterations": pick([1, 1, 2]),
            "max_completion_length": pick([6, 14]),
            "temperature": pick([1.0, 0.7]),
        }
        if name == "GRPO":
            stock["loss_type"] = pick(["dapo", "grpo", "bnpo", "dr_grpo"])
            stock["importance_sampling_level"] = pick(["token", "sequence"])
        fast["merge_accumulation"] = pick(["auto", "auto", "off"])
    return {
        "name": name, "number": number, "rotation": rotation, "switch": pick([16, 24, 40, 64]),
        "family": pick(OF.get(rotation, COMMON)), "lora": pick([True, True, False]), "again": chosen.random() < 0.2,
        "stock": stock, "fast": fast,
    }  # fmt: skip


def run(fast: bool, folder: Path, chosen: dict[str, Any]) -> Any:
    """Train as a setting says, and once more with the same trainer if it is one to be trained again."""
    name, options = chosen["name"], dict(chosen["stock"])
    if fast:
        options |= chosen["fast"] | {"config": getattr(fastpack_trl, f"Fast{name}Config")}
    made, reference = (model(chosen["family"], chosen["rotation"], chosen["switch"], seed) for seed in (0, 1))
    needs = name == "DPO" and not chosen["lora"] and not options["precompute_ref_log_probs"]
    torch.manual_seed(0)
    trainer = build(
        name, folder, fast=fast, model=made, lora=chosen["lora"], eval_steps=2,
        data=pairs(24, prompt=36) if name == "DPO" else prompts(24),
        trainer={"ref_model": reference} if needs else None, **options,
    )  # fmt: skip
    for _ in range(1 + chosen["again"]):
        trainer.train()
    return trainer


def difference(ours: Any, stock: Any) -> str:
    """Return the first figure or weight that differs; empty if none does."""
    if logged := side_by_side.difference(figures(ours), figures(stock), RTOL, ATOL, own_error):
        return logged
    theirs = dict(stock.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        if not torch.allclose(weight, theirs[name], rtol=RTOL, atol=10 * ATOL):
            return f"{name}: {float((weight - theirs[name]).abs().max()):.1e} apart"
    return ""


def compare(key: tuple[str, int]) -> dict[str, Any]:
    """Run a setting with both trainers; return what differs, and what TRL raises."""
    chosen, ends = draw(*key), list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        for fast in (False, True):
            try:
                ends.append(run(fast, Path(folder) / str(fast), chosen))
            except Exception as error:  # noqa: BLE001  (of TRL too: compared)
                ends.append(f"{type(error).__name__}: {error}"[:300])
        stock, ours = ends
        if isinstance(stock, str) or isinstance(ours, str):
            same = isinstance(stock, str) and isinstance(ours, str) and stock.split(":")[0] == ours.split(":")[0]
            differs = "" if same else f"TRL: {stock}; fastpack: {ours}"
        else:
            differs = difference(ours, stock)
    report = {} if isinstance(ours, str) else {line.feature: str(line) for line in ours.fastpack_report}
    error = stock if isinstance(stock, str) else ""
    return {"differs": differs, "error": error, "report": report, "setting": chosen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("--first", 0), ("--count", COUNT), ("--workers", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    keys = [(kind, number) for number in range(args.first, args.first + args.count) for kind in KINDS]
    done = []
    with ProcessPoolExecutor(args.workers, get_context("spawn"), _quiet) as pool:
        for key, found in zip(keys, pool.map(compare, keys), strict=True):
            done.append(found)
            if said := found["differs"] or found["error"]:
                print(*key, "differs" if found["differs"] else "both raise", said, flush=True)
    wrong, errors = (sum(bool(found[name]) for found in done) for name in ("differs", "error"))
    print(f"{len(done)} settings, {errors} of them an error of TRL, {wrong} differ")
    if args.json:
        args.json.write_text(json.dumps(done, indent=1), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
