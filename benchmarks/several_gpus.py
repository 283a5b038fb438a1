"""``python -m benchmarks several_gpus``: save in the middle of a run of several processes, resume, and load.

    python -m benchmarks several_gpus --engine fsdp2 --state sharded
    python -m benchmarks several_gpus --model tiny-qwen3 --tokens 64

A run is saved at its half and resumed with other weights; its losses must be those of the run that was not interrupted.
The last checkpoint is loaded in one process; its loss must be that of the resumed model. Speed is measured by
``python -m benchmarks several_gpus --gpus 8`` (`benchmarks.scaling`).
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import Parser, scaling
from benchmarks.models import MODELS, shape_of
from benchmarks.rows import Row
from benchmarks.run import make_trainer, process_command

STEPS = 14
BUDGETS = {"ddp": 1e-3, "fsdp2": 5e-3}
"""Largest relative difference of a loss. FSDP 2 logs losses in bf16: a step of one on two ranks is 2**-8 of it."""


def check(row: Mapping[str, Any], side: str, *, folder: str, sharded: bool, seed: int) -> dict[str, Any]:
    """Save, resume and load in all processes; return the relative differences of the losses and of the loaded model."""
    what = Row("several_gpus", row["model"], row["tokens"], "full", layers=row["layers"], engine=row["engine"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half, runs = STEPS // 2, Path(folder)

    def trained(name: str, steps: int, begin: str | None = None, weights: int = seed) -> Any:
        fields = {
            **what.arguments(device), "output_dir": str(runs / name), "max_steps": STEPS, "logging_steps": 1,
            "save_strategy": "steps", "save_steps": half, "seed": seed, "cuda_graph": "off",
        }  # fmt: skip
        trainer = make_trainer(what, True, fields, weights)
        trainer.add_callback(_stop_after(steps))
        trainer.train(resume_from_checkpoint=begin)
        return trainer

    whole = losses_of(trained("whole", STEPS))
    trained("saved", half)
    resumed = trained("saved", STEPS, str(runs / "saved" / f"checkpoint-{half}"), seed + 1)
    after = losses_of(resumed)[half:]
    found = {"losses": max(abs(a - b) / abs(b) for a, b in zip(after, whole[half:], strict=True))}
    ids = torch.arange(64, device=device)[None]
    with torch.no_grad(), resumed.accelerator.autocast():
        expected = float(resumed.model(input_ids=ids, labels=ids, use_cache=False).loss)
    resumed.accelerator.wait_for_everyone()
    last = runs / "saved" / f"checkpoint-{STEPS}"
    if sharded:  # by all processes: they wait for each other at its end
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(last / "pytorch_model_fsdp_0"), str(runs / "merged"))
        last = runs / "merged"
    if not resumed.is_world_process_zero():
        return found
    from transformers import AutoModelForCausalLM

    if sharded:
        resumed.accelerator.unwrap_model(resumed.model).config.save_pretrained(last)
    loaded = AutoModelForCausalLM.from_pretrained(last).to(device)
    with torch.no_grad(), resumed.accelerator.autocast():
        loss = float(loaded(input_ids=ids, labels=ids, use_cache=False).loss)
    return found | {"loaded": abs(loss - expected) / abs(expected)}


def losses_of(trainer: Any) -> list[float]:
    """Return the logged losses of a run."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _stop_after(steps: int) -> Any:
    from transformers import TrainerCallback

    class StopAfter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step >= steps

    return StopAfter()


def parse(words: Sequence[str]) -> Namespace:
    """Return the options, with `gpus` those of `benchmarks.scaling`."""
    if "--gpus" in words:
        return scaling.parse(words)
    parser = Parser("several_gpus", __doc__)
    add = parser.add_argument
    add("--engine", choices=tuple(BUDGETS), default="ddp", help="default: ddp; fsdp2 needs GPUs")
    add("--state", choices=("full", "sharded"), default="full", help="of the checkpoints of fsdp2 (default: full)")
    add("--model", choices=tuple(MODELS), default="qwen3-0.6b", help="default: qwen3-0.6b")
    add("--layers", type=int, default=None, help="the first layers only")
    add("--tokens", type=int, default=1024, help="of a row (default: %(default)s)")
    add("--processes", type=int, default=2, help="default: %(default)s")
    add("--timeout", type=float, default=300, help="seconds (default: %(default)s)")
    args = parser.parse_args(words)
    shape_of(args.model).cut_to(args.layers)
    return args


def main(words: Sequence[str]) -> int:
    """Run the check, and print how far losses and the loaded model are off; 1 if that is over the budget."""
    args = parse(words)
    if "gpus" in args:
        return scaling.report(args)
    row = {"model": args.model, "tokens": args.tokens, "layers": args.layers, "engine": args.engine}
    state = ("--fsdp_state_dict_type", f"{args.state.upper()}_STATE_DICT") if args.engine == "fsdp2" else ()
    launch = process_command("benchmarks.several_gpus:check", args.engine, args.processes, *state)
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        options = {"folder": folder, "sharded": args.state == "sharded", "seed": 0}
        found = replace(launch, options=options, timeout=args.timeout)(row, "fastpack")
    if "failed" in found:
        print(f"failed: {found['failed']}", *found.get("last_lines", ())[-15:], sep="\n")
        return 1
    budget = BUDGETS[args.engine]
    print(f"losses {found['losses']:.1e} apart, loaded model {found['loaded']:.1e}; at most {budget:g}")
    return int(not max(found.values()) <= budget)
