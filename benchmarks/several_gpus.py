"""Stock and ours under `accelerate launch`, one process per GPU: the losses of each step, and what the first one takes.

    python benchmarks/several_gpus.py --json several_gpus.json

Each side of each case is a launch of its own, trained by its own `train()` on the same rows in the same order. A record
that exists is continued: what it holds already is not run again. ``--device cpu`` runs tiny shapes under gloo (DDP
only: accelerate starts no FSDP on a CPU).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SIDES = ("stock", "fastpack")
STEPS = 14
PROCESSES = 2
TOKENIZER_VOCABULARY = 8_192
_FSDP = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
_LOGGED = {"losses": "loss", "gradient_norms": "grad_norm"}
_LAST_LINES = 60
_STUCK_AFTER = 100.0
"""Seconds after which a rank writes where it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training: ``Case("fsdp2 full", "qwen3-0.6b", 4096, "none", fsdp=True, budget=1e-3)``."""

    name: str
    shape: str
    tokens: int
    """Of a packed row; one row per rank and step."""
    lora: str
    """``none`` trains every weight, ``linear`` the projections by LoRA, ``experts`` the stacks of experts too."""
    fsdp: bool = False
    budget: float | None = None
    """Largest relative difference of a logged loss from stock's; None where stock's documents see each other."""
    layers: int | None = None


CASES = (
    Case("fsdp2 full", "qwen3-0.6b", 4096, "none", fsdp=True, budget=1e-3),
    Case("fsdp2 lora", "qwen3-0.6b", 4096, "linear", fsdp=True, budget=1e-3),
    Case("ddp full", "qwen3-0.6b", 4096, "none", budget=1e-3),
    Case("ddp lora", "qwen3-0.6b", 4096, "linear", budget=1e-3),
    Case("ddp qwen3-moe", "qwen3-30b-a3b", 4096, "experts", budget=5e-3, layers=4),
    Case("ddp gpt-oss", "gpt-oss-20b", 4096, "experts", layers=4),
)
TINY = (
    Case("ddp full", "tiny-qwen3", 256, "none", budget=1e-3),
    Case("ddp gpt-oss", "tiny-gpt-oss", 256, "experts"),
)


def train(case: Case, side: str, device: str, out: Path) -> None:
    """Train one side in this rank; rank 0 writes its figures to `out`."""
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from benchmarks.lora_models import definitions
    from benchmarks.model_shapes import build_model, shape_of
    from fastpack_trl import FastSFTConfig, FastSFTTrainer
    from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter

    class Watch(TrainerCallback):
        """The end of each step, after the device."""

        def __init__(self) -> None:
            self.marks: list[float] = []

        def mark(self) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.mark()

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = shape_of(case.shape).cut_to(case.layers)
    vocabulary = min(TOKENIZER_VOCABULARY, int(shape.fields["vocab_size"]))
    tokenizer, documents = definitions(case.tokens * PROCESSES * (STEPS + 4), vocabulary, case.tokens)
    model = build_model(shape, positions=case.tokens, seed=0, device=device)
    config, trainer_class = (SFTConfig, SFTTrainer) if side == "stock" else (FastSFTConfig, FastSFTTrainer)
    watch = Watch()
    faulthandler.dump_traceback_later(_STUCK_AFTER, exit=False)  # to the log, which a failed side keeps the end of
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder, max_length=case.tokens, packing=True, per_device_train_batch_size=1, max_steps=LONG_RUN,
            logging_steps=1, bf16=device == "cuda", use_cpu=device == "cpu", save_strategy="no", report_to="none",
            disable_tqdm=True, seed=0, learning_rate=2e-5 if case.lora == "none" else 2e-4,
        )  # fmt: skip
        trainer = trainer_class(
            model=model,
            args=args,
            train_dataset=documents,
            processing_class=tokenizer,
            peft_config=_lora(case, model),
            callbacks=[watch, EndsAfter(STEPS)],
        )
        watch.mark()
        trainer.train()
    faulthandler.cancel_dump_traceback_later()
    if not trainer.is_world_process_zero():
        return
    assert trainer.accelerator.num_processes == PROCESSES, trainer.accelerator.num_processes
    seconds = [end - begin for begin, end in pairwise(watch.marks)]
    report = getattr(trainer, "fastpack_report", None)
    figures = {
        **{name: [entry[key] for entry in trainer.state.log_history if key in entry] for name, key in _LOGGED.items()},
        "seconds_to_first_step": seconds[0],  # from the call of `train`
        "step_ms": [1000 * one for one in seconds[1:]],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "sharded": bool(trainer.is_fsdp_enabled),
        "report": report.to_dict() if report is not None else None,
    }
    out.write_text(json.dumps(figures), encoding="utf-8")


def _lora(case: Case, model: Any) -> Any:
    from peft import LoraConfig

    from benchmarks.lora_models import PROJECTIONS, RANK

    if case.lora == "none":
        return None
    if case.lora == "linear":
        return LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    stacks = [
        name for name, _ in model.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    attention = [name for name in PROJECTIONS if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
    return LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=attention, target_parameters=stacks, task_type="CAUSAL_LM"
    )


def launch(case: Case, side: str, device: str, limit: float) -> dict[str, Any]:
    """Run one side on all ranks; its figures, or ``{"error": ...}`` with the last lines that it printed."""
    script = [str(Path(__file__).resolve()), "--train", case.name, side, "--device", device]
    # The ranks run this file as a script: its folder, not the checkout, would be where they look for modules.
    root = str(Path(__file__).resolve().parents[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    if device == "cuda":
        options = [
            "--multi_gpu",
            "--num_processes",
            str(PROCESSES),
            "--mixed_precision",
            "bf16",
            "--main_process_port",
            "0",
        ]
        command = [sys.executable, "-m", "accelerate.commands.launch", *(_FSDP if case.fsdp else ()), *options]
        if case.fsdp:
            command.remove("--multi_gpu")
    else:  # `accelerate launch --cpu` starts one process
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "figures.json"), Path(folder, "log")
        begin = time.perf_counter()
        with (
            log.open("w", encoding="utf-8") as stream,
            subprocess.Popen(
                [*command, *script, "--json", str(out)], stdout=stream, stderr=subprocess.STDOUT, env=environment
            ) as process,
        ):
            try:
                code = process.wait(timeout=limit)
                error = "" if code == 0 and out.exists() else f"ended with {code}"
            except subprocess.TimeoutExpired:
                error = f"had not ended after {limit:.0f} s"
                process.terminate()
        seconds = time.perf_counter() - begin
        if error:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            return {"error": error, "seconds": seconds, "last_lines": lines}
        return {**json.loads(out.read_text(encoding="utf-8")), "seconds": seconds}


def judge(case: Case, row: dict[str, Any]) -> None:
    """Write how far the losses are apart into `row`, and whether the case passed."""
    stock, ours = (row.get(side, {}) for side in SIDES)
    finished = "losses" in ours and len(ours["losses"]) == STEPS
    row["largest_difference"] = None
    row["passed"] = finished and (case.budget is None or "losses" in stock)
    if not finished or "losses" not in stock or case.budget is None:
        return
    apart = [abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True)]
    row["largest_difference"] = max(apart)
    row["passed"] = max(apart) <= case.budget


def main() -> None:
    """Run the cases that the record lacks, or train one side when launched as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the record; continued where it exists")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", nargs="*", help="names of cases; default: all")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that one side may take")
    parser.add_argument("--train", nargs=2, metavar=("CASE", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = {case.name: case for case in (CASES if options.device == "cuda" else TINY)}
    if options.train:
        train(cases[options.train[0]], options.train[1], options.device, options.json)
        return
    from fastpack_trl.measure.record import make_record

    rows: dict[str, Any] = {}
    if options.json.exists():
        rows = {row["name"]: row for row in json.loads(options.json.read_text(encoding="utf-8"))["rows"]}
    chosen = options.cases or list(cases)
    for name in chosen:
        case, row = cases[name], rows.setdefault(name, {"name": name})
        for side in SIDES:
            if "losses" in row.get(side, {}):
                continue
            row[side] = launch(case, side, options.device, options.limit)
            judge(case, row)
            settings = {"steps": STEPS, "processes": PROCESSES, "row_per_rank": 1}
            complete = all("passed" in rows.get(other, {}) for other in cases)
            record = make_record(
                case="several_gpus", settings=settings, rows=list(rows.values()), complete=complete,
                device=options.device, threads=1, seed=0,
            )  # fmt: skip
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            said = row[side].get("error") or f"first step {row[side]['seconds_to_first_step']:.1f} s"
            print(f"{name} / {side}: {said}, {row[side]['seconds']:.0f} s in all", flush=True)
        print(
            f"{name}: {'passed' if row['passed'] else 'FAILED'}, losses apart {row['largest_difference']}", flush=True
        )
    sys.exit(0 if all(rows[name]["passed"] for name in chosen) else 1)


if __name__ == "__main__":
    main()
