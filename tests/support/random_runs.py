"""Whole runs beside stock's in random settings: ``python tests/support/random_runs.py --count 300 --json runs.json``.

Each number is one setting, the same at all times: a family, what trains, the kind of data, rows, accumulation, what a
callback does in the middle, a run that is resumed. Both trainers begin with the same weights; log and weights are
compared. `test_random_runs.py` has a sample of the numbers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import random
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import side_by_side
import torch
from peft import LoraConfig
from trainer_material import callback, figures, make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer, verify_packing
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
    data = pick(["text", "text", "prompt_completion", "conversational", "ids"])
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
        stock["eval_packing"] = pick([None, False])
    else:
        stock["pad_to_multiple_of"] = pick([None, 8])
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
    fast = {"merge_accumulation": merged, "activation_memory": memory, "packed_attention": attention}
    return chosen_run | {"fast": fast}


def train(cls: type[SFTTrainer], folder: Path, chosen: dict[str, Any]) -> SFTTrainer:
    """Train once as a setting says, and go on from the checkpoint of the second step where it is one to be resumed."""
    torch.manual_seed(0)
    save = {"save_strategy": "steps", "save_steps": 2} if chosen["resume"] else {}
    given = settings(folder, **{"report_to": "none", **chosen["stock"], **save})
    args = FastSFTConfig(**given, **chosen["fast"]) if cls is FastSFTTrainer else SFTConfig(**given)
    targets = chosen["lora"]
    lora = None if targets is None else LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=0.0)

    def make() -> SFTTrainer:
        trainer = cls(
            tiny_model(chosen["family"]), args=copy.deepcopy(args), train_dataset=make_dataset(chosen["data"]),
            eval_dataset=make_dataset(chosen["data"], 8, seed=7), processing_class=make_tokenizer(),
            peft_config=copy.deepcopy(lora),
        )  # fmt: skip
        trainer.add_callback(deed(chosen["deed"], trainer))
        return trainer

    trainer = make()
    trainer.train()
    if chosen["resume"]:
        trainer = make()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer


def difference(ours: SFTTrainer, stock: SFTTrainer) -> str:
    """Return the first figure or weight that differs; empty where none does."""
    if logged := side_by_side.difference(figures(ours), figures(stock), RTOL, ATOL):
        return logged
    mine, theirs = (
        {name: value.detach() for name, value in one.accelerator.unwrap_model(one.model).named_parameters()
         if value.requires_grad}
        for one in (ours, stock)
    )  # fmt: skip
    if mine.keys() != theirs.keys():
        return "other parameters train"
    for name, weight in mine.items():
        # A bias of keys shifts all scores of a query alike: its gradient is rounding, which adafactor scales up.
        same = torch.allclose(weight, theirs[name], rtol=RTOL, atol=10 * ATOL, equal_nan=True)
        if not same and not name.endswith("k_proj.bias"):
            return f"{name}: weights differ by up to {(weight - theirs[name]).abs().max():.2g}"
    return ""


def compare(number: int) -> dict[str, Any]:
    """Run one setting on both sides; an error of stock's has to be one of ours, by its class."""
    chosen = draw(number)
    ends: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        for cls in (SFTTrainer, FastSFTTrainer):
            try:
                ends.append(train(cls, Path(folder) / cls.__name__, chosen))
            except Exception as error:  # noqa: BLE001  (of stock too: compared)
                ends.append(f"{type(error).__name__}: {error}")
        stock, ours = ends
        if isinstance(ours, str) and "packed_attention='sdpa' cannot be used here" in ours:
            differs = ""  # asked for by name, and it would be wrong for the family: refused
        elif isinstance(stock, str) or isinstance(ours, str):
            alike = isinstance(stock, str) and isinstance(ours, str) and stock.split(":")[0] == ours.split(":")[0]
            differs = "" if alike else f"stock: {str(stock)[:200]}; ours: {str(ours)[:200]}"
        else:
            differs = difference(ours, stock)
    ran = isinstance(ours, FastSFTTrainer)
    return {
        "number": number, "differs": differs, "error": stock[:200] if isinstance(stock, str) else "",
        "report": {line.feature: str(line) for line in ours.fastpack_report} if ran else {},
        "log": figures(ours) if ran else [], "setting": chosen,
    }  # fmt: skip


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count)
    done: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        for found in pool.map(compare, numbers):
            done.append(found)
            if found["differs"]:
                print(f"{found['number']}: {found['differs']}", flush=True)
    wrong = [found["number"] for found in done if found["differs"]]
    errors = sum(bool(found["error"]) for found in done)
    print(f"{len(done)} settings, {errors} of them an error on both sides, {len(wrong)} differ: {wrong}")
    if args.json:
        args.json.write_text("\n".join(["[", ",\n".join(map(json.dumps, done)), "]", ""]), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
