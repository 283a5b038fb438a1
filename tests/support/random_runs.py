"""Whole runs beside stock's in random settings: ``python tests/support/random_runs.py --count 300 --json runs.json``.

Each number is one setting, the same at all times: a family, what trains, the kind of data, rows, accumulation, what a
callback does in the middle, a run that is resumed. Both trainers begin with the same weights; log and weights are
compared. `test_random_runs.py` has a sample of the numbers.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import side_by_side
import torch
from peft import LoraConfig
from trainer_material import build, callback, figures
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, verify_packing
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.testing import FAMILIES, tiny_model

COUNT = 300
RTOL, ATOL = 1e-4, 2e-5
"""Of logged figures and of weights: fp32, up to six steps of AdamW or SGD."""

TRAINED = tuple(family for family in FAMILIES if family not in ("granitemoehybrid", "qwen3_next", "llama4_text"))
"""All but those that stock refuses to train: without kernels for recurrent layers, or with LoRA."""


@functools.cache
def packs_right(family: str) -> bool:
    """Return whether stock keeps packed documents apart, with the installed transformers; else no run packs."""
    return verify_packing(tiny_model(family), implementation="off").proven


def deed(name: str, trainer: SFTTrainer) -> TrainerCallback:
    """A callback that does something at the beginning of the third optimizer step."""

    def act(state: Any, model: Any) -> None:
        if state.global_step != 2:
            return
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if name == "freeze":
            trained[0].requires_grad_(False)
        elif name == "scale":
            with torch.no_grad():
                trained[-1].mul_(1.01)
        elif name == "eval mode":
            model.eval()
        elif name == "hook":
            model.get_input_embeddings().register_forward_hook(lambda module, given, output: output * 1.01)
        elif name == "generate":
            with torch.no_grad():
                model.eval().generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
            model.train()
        elif name == "evaluate":
            trainer.evaluate()

    return callback("on_substep_end" if name == "substeps" else "on_step_begin", act)()


def draw(number: int) -> dict[str, Any]:
    """Return the setting of a number; the same in every process and version of Python."""
    chosen = random.Random(f"run {number}")
    pick = chosen.choice
    data = pick(["text", "text", "prompt_completion", "conversational", "ids", "packed", "packed_labels"])
    family = pick(TRAINED)
    packing = pick([True, True, False]) and packs_right(family)
    stock: dict[str, Any] = {
        "packing": packing,
        "per_device_train_batch_size": pick([1, 1, 2, 3]),
        "gradient_accumulation_steps": pick([1, 1, 2, 3]),
        "max_length": pick([24, 48, 48, 64]),
        "gradient_checkpointing": pick([True, False]),
        "optim": pick(["adamw_torch", "sgd", "adafactor"]),
        "max_grad_norm": pick([1.0, 0.1, 0.0]),
        "loss_type": pick(["nll", "nll", "dft"]),
        "logging_steps": pick([1, 2, 3]),
        "eval_strategy": pick(["no", "steps"]),
        "weight_decay": pick([0.0, 0.1]),
        "seed": chosen.randrange(99),
        "max_steps": pick([4, 5, 6]),
    }
    if packing:
        stock["packing_strategy"] = pick(["bfd", "bfd", "bfd_split", "wrapped"])
        # TRL cannot evaluate rows of a user that it truncates and that a padding-free collator reads.
        stock["eval_packing"] = pick([None, False]) if not data.startswith("packed") else None
    else:
        stock["pad_to_multiple_of"] = pick([None, 8])
    if data.startswith("packed") and not packing and packs_right(family) and pick([True, False]):
        stock |= {"padding_free": True, "max_length": None}
        if experts_modules(tiny_model(family)):  # stock's auxiliary loss counts the padding of the row
            stock["pad_to_multiple_of"] = None
    if data == "prompt_completion":
        stock["completion_only_loss"] = pick([None, False])
    if data == "conversational":
        stock["assistant_only_loss"] = pick([True, False])
    if chosen.random() < 0.1:
        stock["label_smoothing_factor"], stock["loss_type"] = 0.1, "nll"
    if chosen.random() < 0.1:
        stock["include_num_input_tokens_seen"] = True
    gradient_checkpointing = stock["gradient_checkpointing"]
    chosen_run = {"number": number, "family": family, "lora": pick([None, "all-linear"]), "data": data, "stock": stock}
    deeds = ["", "", "", "freeze", "scale", "eval mode", "hook", "generate", "evaluate", "substeps"]
    chosen_run |= {"deed": pick(deeds), "resume": chosen.random() < 0.15}
    merged = pick(["auto", "auto", "off"])
    memory = pick(["auto", "auto", "keep", "checkpoint"]) if gradient_checkpointing else "auto"
    attention = pick(["auto", "auto", "sdpa", "auto"])
    # Named, it stops a run in which nothing can be shared.
    shared = pick(["auto", "on", "off"]) if packing or "padding_free" in stock else pick(["auto", "off"])
    fast = {
        "merge_accumulation": merged, "activation_memory": memory, "packed_attention": attention,
        "share_prefixes": shared, "fused_layers": "on",
    }  # fmt: skip
    return chosen_run | {"fast": fast}


def run(cls: type[SFTTrainer], folder: Path, chosen: dict[str, Any]) -> SFTTrainer:
    """Train once as a setting says, and go on from the checkpoint of the second step if it is one to be resumed."""
    options = {
        "family": chosen["family"], "data": chosen["data"], "fast": chosen["fast"] if cls is FastSFTTrainer else None,
        **chosen["stock"], **({"save_strategy": "steps", "save_steps": 2} if chosen["resume"] else {}),
    }  # fmt: skip
    torch.manual_seed(0)
    for checkpoint in (None, str(folder / "checkpoint-2"))[: 1 + chosen["resume"]]:
        targets = chosen["lora"]
        lora = targets and LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)
        trainer: SFTTrainer = build(cls, folder, trainer={"peft_config": lora}, **options)
        trainer.add_callback(deed(chosen["deed"], trainer))
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def difference(ours: SFTTrainer, stock: SFTTrainer) -> str:
    """Return the first figure or weight that differs; empty if none does."""
    if logged := side_by_side.difference(figures(ours), figures(stock), RTOL, ATOL):
        return logged
    mine, theirs = (dict(one.accelerator.unwrap_model(one.model).named_parameters()) for one in (ours, stock))
    if {n for n, weight in mine.items() if weight.requires_grad} != {n for n, w in theirs.items() if w.requires_grad}:
        return "other parameters train"
    for name, weight in mine.items():
        # A bias of keys shifts all scores of a query alike: its gradient is rounding, which adafactor scales up.
        same = torch.allclose(weight, theirs[name], rtol=RTOL, atol=10 * ATOL, equal_nan=True)
        if not same and not name.endswith("k_proj.bias"):
            return f"{name}: {float((weight - theirs[name]).abs().max()):.1e} apart"
    return ""


def compare(number: int) -> dict[str, Any]:
    """Run a setting with both trainers; return what differs, and what both raise. An error has to be one of ours, by
    its class."""
    chosen = draw(number)
    ends: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for cls in (SFTTrainer, FastSFTTrainer):
            try:
                ends.append(run(cls, Path(folder) / cls.__name__, chosen))
            except Exception as error:  # noqa: BLE001  (of stock too: compared)
                ends.append(f"{type(error).__name__}: {error}")
        stock, ours = ends
        refused = ("packed_attention='sdpa' cannot be used here", "share_prefixes='on': ")
        if isinstance(ours, str) and any(reason in ours for reason in refused):
            differs = ""  # asked for by name, and it would be wrong for the family or the run: refused
        elif isinstance(stock, str) or isinstance(ours, str):
            alike = isinstance(stock, str) and isinstance(ours, str) and stock.split(":")[0] == ours.split(":")[0]
            differs = "" if alike else f"stock: {str(stock)[:200]}; ours: {str(ours)[:200]}"
        else:
            differs = difference(ours, stock)
    report = {} if isinstance(ours, str) else {line.feature: str(line) for line in ours.fastpack_report}
    error = stock[:200] if isinstance(stock, str) else ""
    return {"number": number, "differs": differs, "error": error, "report": report, "setting": chosen}


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def main(compare: Callable[[int], dict[str, Any]] = compare, count: int = COUNT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("--first", 0), ("--count", count), ("--workers", 2)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    done = []
    with ProcessPoolExecutor(args.workers, get_context("spawn"), _quiet) as pool:
        for found in pool.map(compare, range(args.first, args.first + args.count)):
            done.append(found)
            if found["differs"]:
                print(f"{found['number']}: {found['differs']}", flush=True)
    wrong = [found["number"] for found in done if found["differs"]]
    errors = sum(bool(found["error"]) for found in done)
    print(f"{len(done)} settings, {errors} of them an error on both sides, {len(wrong)} differ: {wrong}")
    if args.json:
        args.json.write_text(json.dumps(done, indent=1), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
