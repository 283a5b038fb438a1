"""Stock, stock compiled and ours under `accelerate launch`, one process per GPU: losses, step times, memory per rank.

    python -m benchmarks.several_gpus --json several_gpus.json

Each side of each case is a launch of its own, trained by its own `train()` on the same rows in the same order; compiled
is accelerate's regional compilation, by its flags, eager is ours without CUDA graphs. A step time is the median of the
last steps, after all compiling. A case that resumes saves in the middle of a run, goes on from there with another
model, and loads the result in one process. A case of which a side failed is run again by the same command. ``--device
cpu`` runs tiny shapes under gloo (DDP only: accelerate starts no FSDP on a CPU).
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.command import CaseCommand
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.training_run import OwnProcess, accelerate_launch, torchrun
from fastpack_trl.errors import UserError

SIDES = ("stock", "fastpack")
"""Of which the losses are compared."""
COMPILED = "stock compiled"
EAGER = "eager"
"""Ours without CUDA graphs, where a case has them."""
STEPS = 14
LAST = 6
"""Steps at the end whose median is taken: ours measures in the second and compiles in the third."""
PROCESSES = 2
TOKENIZER_VOCABULARY = 8_192
ROUNDED = 5e-3
"""Budget of FSDP 2: it hands out a loss in bf16, one step of which on one of two ranks is 2**-8 of their mean."""
_FSDP = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
_COMPILE = ("--dynamo_backend", "inductor", "--dynamo_use_regional_compilation")
_LOGGED = {"losses": "loss", "gradient_norms": "grad_norm"}
_STUCK_AFTER = 100.0
"""Seconds after which a rank writes where it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """One training: ``Case("fsdp2 full", "qwen3-0.6b", 4096, "none", fsdp=True, budget=ROUNDED)``."""

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
    bf16: bool = False
    """Frozen weights are loaded in bf16; else in the shape's own dtype."""
    micro_batches: int = 1
    """Of an optimizer step."""
    checkpoints: str = ""
    """``full`` or ``sharded``: ours saves, resumes and is loaded in one process; no other side runs."""
    steps: int = STEPS
    graphs: bool = False
    """Ours records CUDA graphs, from its first settled step on, and runs without them too. Elsewhere they are off: by
    default they are compared for dozens of steps."""

    @property
    def sides(self) -> tuple[str, ...]:
        """Return the sides that run."""
        if self.checkpoints:
            return (SIDES[1],)
        return (SIDES[0], EAGER if self.graphs else COMPILED, SIDES[1])


CASES = (
    Case("fsdp2 full", "qwen3-0.6b", 4096, "none", fsdp=True, budget=ROUNDED),
    Case("fsdp2 8b lora", "qwen3-8b", 4096, "linear", fsdp=True, budget=ROUNDED, layers=12, bf16=True),
    Case("fsdp2 full checkpoints", "qwen3-0.6b", 1024, "none", fsdp=True, budget=ROUNDED, layers=4, checkpoints="full"),
    Case("ddp lora", "qwen3-0.6b", 4096, "linear", budget=1e-3),
    Case("ddp lora captured", "qwen3-0.6b", 4096, "linear", budget=1e-3, steps=40, graphs=True),
    Case("ddp full", "qwen3-0.6b", 4096, "none", budget=1e-3),
    Case("ddp gpt-oss", "gpt-oss-20b", 4096, "experts", layers=4),
    Case("ddp 8b lora", "qwen3-8b", 4096, "linear", budget=5e-3, layers=12, bf16=True),
    Case("fsdp2 full accumulated", "qwen3-0.6b", 1024, "none", fsdp=True, budget=ROUNDED, micro_batches=8),
    Case("ddp full accumulated", "qwen3-0.6b", 1024, "none", budget=1e-3, micro_batches=8),
    Case(
        "fsdp2 sharded checkpoints", "qwen3-0.6b", 1024, "none", fsdp=True, budget=ROUNDED, layers=4,
        checkpoints="sharded",
    ),
    Case("fsdp2 lora", "qwen3-0.6b", 4096, "linear", fsdp=True, budget=ROUNDED),
    Case("ddp qwen3-moe", "qwen3-30b-a3b", 4096, "experts", budget=5e-3, layers=4),
    Case("fsdp2 qwen3-moe", "qwen3-30b-a3b", 4096, "experts", fsdp=True, budget=ROUNDED, layers=4),
)  # fmt: skip
"""From the most to the least important."""
TINY = (
    Case("ddp full", "tiny-qwen3", 256, "none", budget=1e-3),
    Case("ddp full accumulated", "tiny-qwen3", 64, "none", budget=1e-3, micro_batches=4),
    Case("ddp gpt-oss", "tiny-gpt-oss", 256, "experts"),
    Case("ddp checkpoints", "tiny-qwen3", 64, "none", budget=1e-3, checkpoints="full"),
)


def cases_of(device: str) -> dict[str, Case]:
    """Return the cases of a device by name."""
    return {case.name: case for case in (CASES if device == "cuda" else TINY)}


def train(row: Mapping[str, Any], side: str, *, device: str, folder: str) -> dict[str, Any]:
    """Train one side in this rank; return the figures of all ranks.

    Args:
        folder: of all ranks, for checkpoints.
    """
    import torch
    from accelerate.utils import gather_object

    from fastpack_trl.bench.run_watch import RunWatch, peaks_gib
    from fastpack_trl.measure.payback import LONG_RUN

    case = cases_of(device)[row["name"]]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    faulthandler.dump_traceback_later(_STUCK_AFTER, exit=False)  # to the log, which a failed side keeps the end of
    watch = RunWatch(warmup=1, timed=case.steps - 1, peaks_from=1)
    trainer = _trainer(case, side, device, {"output_dir": f"{folder}/run", "max_steps": LONG_RUN}, [watch])
    watch.begin()
    trainer.train()
    figures = _logged(trainer)
    if case.checkpoints:
        figures["checkpoints"] = _resume(case, side, device, Path(folder), figures["losses"])
    faulthandler.cancel_dump_traceback_later()
    peaks = gather_object([peaks_gib(device)])
    assert trainer.accelerator.num_processes == PROCESSES, trainer.accelerator.num_processes
    report = getattr(trainer, "fastpack_report", None)
    return {
        **figures,
        "seconds_to_first_step": watch.first_step,  # from the call of `train`
        "step_ms": [1000 * one for one in watch.seconds],
        "last_step_ms": 1000 * median(watch.seconds[-LAST:]),
        **{name: [each[name] for each in peaks] for name in peaks[0]},  # of each rank, after the first step
        "sharded": bool(trainer.is_fsdp_enabled),
        "report": report.to_dict() if report is not None else None,
    }


def _logged(trainer: Any) -> dict[str, Any]:
    log = trainer.state.log_history
    return {name: [entry[key] for entry in log if key in entry] for name, key in _LOGGED.items()}


def _trainer(
    case: Case, side: str, device: str, options: dict[str, Any], callbacks: Sequence[Any] = (), seed: int = 0
) -> Any:
    """Return the trainer of a side, of a model with random weights."""
    import torch
    from trl import SFTConfig, SFTTrainer

    from benchmarks.lora_models import definitions
    from benchmarks.model_shapes import build_model, shape_of
    from fastpack_trl import FastSFTConfig, FastSFTTrainer

    shape = shape_of(case.shape).cut_to(case.layers)
    if case.bf16 and device == "cuda":
        shape = replace(shape, weights=torch.bfloat16)
    vocabulary = min(TOKENIZER_VOCABULARY, int(shape.fields["vocab_size"]))
    rows = PROCESSES * case.micro_batches * (case.steps + 4)
    tokenizer, documents = definitions(case.tokens * rows, vocabulary, case.tokens)
    model = build_model(shape, positions=case.tokens, seed=seed, device=device)
    config, trainer_class = (SFTConfig, SFTTrainer) if side in (SIDES[0], COMPILED) else (FastSFTConfig, FastSFTTrainer)
    ours = {"cuda_graph": "on" if case.graphs and side == SIDES[1] else "off"} if config is FastSFTConfig else {}
    args = config(
        max_length=case.tokens, packing=True, per_device_train_batch_size=1, logging_steps=1, bf16=device == "cuda",
        gradient_accumulation_steps=case.micro_batches, use_cpu=device == "cpu", report_to="none", disable_tqdm=True,
        seed=0, learning_rate=2e-5 if case.lora == "none" else 2e-4,
        **({"save_strategy": "no"} | ours | options),
    )  # fmt: skip
    return trainer_class(
        model=model, args=args, train_dataset=documents, processing_class=tokenizer, peft_config=_lora(case),
        callbacks=list(callbacks),
    )  # fmt: skip


def _resume(case: Case, side: str, device: str, folder: Path, losses: list[float]) -> dict[str, Any]:
    """Save in the middle, resume with other weights, save, and load in one process.

    Returns:
        How far the losses after resuming, and the loss of the loaded model, are from those they must be; relative.
    """
    import torch
    from accelerate.utils import merge_fsdp_weights
    from transformers import AutoModelForCausalLM

    from fastpack_trl.bench.run_watch import RunWatch
    from fastpack_trl.measure.payback import LONG_RUN

    half, run = STEPS // 2, folder / "saved"
    options = {"output_dir": str(run), "max_steps": LONG_RUN, "save_strategy": "steps", "save_steps": half}
    saving = _trainer(case, side, device, options, [RunWatch(warmup=1, timed=half - 1)])  # ends it there
    saving.train()
    resumed = _trainer(case, side, device, options, [RunWatch(warmup=1, timed=STEPS - half - 1)], seed=1)
    resumed.train(resume_from_checkpoint=str(run / f"checkpoint-{half}"))
    after = _logged(resumed)["losses"][half:]
    last = run / f"checkpoint-{STEPS}"
    ids = torch.arange(64, device=device)[None]
    with torch.no_grad(), resumed.accelerator.autocast():
        expected = float(resumed.model(input_ids=ids, labels=ids, use_cache=False).loss)
    resumed.accelerator.wait_for_everyone()
    found = {"losses_apart": max(abs(a - b) / abs(b) for a, b in zip(after, losses[half:], strict=True))}
    if case.checkpoints == "sharded":  # by all ranks: they wait for each other at its end
        merge_fsdp_weights(str(last / "pytorch_model_fsdp_0"), str(folder / "merged"))
    if not resumed.is_world_process_zero():
        return found
    if case.checkpoints == "sharded":
        resumed.accelerator.unwrap_model(resumed.model).config.save_pretrained(folder / "merged")
        last = folder / "merged"
    loaded = AutoModelForCausalLM.from_pretrained(last).to(device)
    with torch.no_grad(), resumed.accelerator.autocast():
        loss = float(loaded(input_ids=ids, labels=ids, use_cache=False).loss)
    return found | {"loaded_apart": abs(loss - expected) / abs(expected)}


def _lora(case: Case) -> Any:
    from peft import LoraConfig

    from benchmarks.lora_models import ALPHA, PROJECTIONS, RANK
    from benchmarks.training_rows import lora_of_experts

    if case.lora == "none":
        return None
    if case.lora == "experts":
        return lora_of_experts(stacks=True, task_type="CAUSAL_LM")
    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")


def launch(case: Case, side: str, device: str, limit: float) -> dict[str, Any]:
    """Run one side on all ranks; its figures, or ``failed`` with the last lines that it printed."""
    if device == "cuda":
        sharding = (*_FSDP, "--fsdp_state_dict_type", f"{(case.checkpoints or 'full').upper()}_STATE_DICT")
        flags = (*(sharding if case.fsdp else ("--multi_gpu",)), *(_COMPILE if side == COMPILED else ()))
        command, environment = accelerate_launch(PROCESSES, *flags, "--mixed_precision", "bf16"), {}
    else:  # `accelerate launch --cpu` starts one process
        command = torchrun(PROCESSES)
        environment = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        if side == COMPILED:
            prefix = "ACCELERATE_DYNAMO_"
            environment |= {f"{prefix}BACKEND": "INDUCTOR", f"{prefix}USE_REGIONAL_COMPILATION": "true"}
    with tempfile.TemporaryDirectory() as folder:
        options = {"device": device, "folder": folder}
        here = OwnProcess(
            "benchmarks.several_gpus:train", options, timeout=limit, command=command, environment=environment
        )
        begin = time.perf_counter()
        found = here({"name": case.name}, side)
        return {**found, "seconds": time.perf_counter() - begin}


def judge(case: Case, row: dict[str, Any]) -> None:
    """Write how far the losses are apart into `row`, how much faster the steps are, and whether the case passed."""
    stock, ours = (row.get(side, {}) for side in SIDES)
    for side in (SIDES[0], COMPILED, EAGER):
        if "last_step_ms" in row.get(side, {}) and "last_step_ms" in ours:
            row[f"times_{side.replace(' ', '_')}"] = row[side]["last_step_ms"] / ours["last_step_ms"]
    finished = "losses" in ours and len(ours["losses"]) == case.steps
    row["largest_difference"] = None
    if case.checkpoints:
        apart = ours.get("checkpoints", {}).values()
        row["largest_difference"] = max(apart, default=None)
        row["passed"] = finished and len(apart) == 2 and max(apart) <= (case.budget or 1e-3)
        return
    row["passed"] = finished and (case.budget is None or "losses" in stock)
    if not finished or "losses" not in stock or case.budget is None:
        return
    apart = [abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True)]
    row["largest_difference"] = max(apart)
    row["passed"] = max(apart) <= case.budget


def measure_case(case: Case, seconds: float, *, device: str, limit: float) -> dict[str, Any]:
    """Run the sides of a case and judge it; ``skipped`` names the sides that failed: it is to be run again."""
    row: dict[str, Any] = {side: launch(case, side, device, limit) for side in case.sides}
    judge(case, row)
    failed = [side for side in case.sides if "failed" in row[side]]
    return row | ({"skipped": f"failed: {', '.join(failed)}"} if failed else {})


def tasks(args: Namespace) -> list[RowTask]:
    """Return the cases.

    Raises:
        UserError: too few devices.
    """
    import torch

    if args.device == "cuda" and torch.cuda.device_count() < PROCESSES:
        raise UserError(
            f"torch sees {torch.cuda.device_count()} CUDA devices, and {PROCESSES} are needed; tiny shapes on the CPU: "
            "--device cpu"
        )
    cases = cases_of(args.device)
    for name in args.rows:
        if name not in cases:
            raise UserError(f"the case {name!r} is not for --device {args.device} (cases: {', '.join(cases)})")
    measured = partial(measure_case, device=args.device, limit=args.timeout)
    return [RowTask({"name": name}, partial(measured, cases[name])) for name in args.rows or cases]


def settings(args: Namespace) -> dict[str, Any]:
    """Return the steps and ranks."""
    return {"steps": STEPS, "processes": PROCESSES, "row_per_rank": 1}


def table(record: Mapping[str, Any]) -> str:
    """Return a line per side and one per case: whether it passed, and how much faster it is."""
    return "\n".join(line for row in record["rows"] for line in _lines(row))


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    name = row["name"]
    for side in (SIDES[0], COMPILED, EAGER, SIDES[1]):
        found = row.get(side, {})
        if why := found.get("failed") or found.get("error"):
            yield f"{name} / {side}: {why}, {found['seconds']:.0f} s in all"
        elif found:
            kind = "reserved" if "reserved_gib" in found else "peak"  # of older records
            ranks = found[f"{kind}_gib"] if isinstance(found[f"{kind}_gib"], list) else [found[f"{kind}_gib"]]
            peaks = ", ".join(f"{peak or 0:.1f}" for peak in ranks)
            last = median(found["step_ms"][-LAST:])
            yield (
                f"{name} / {side}: first step {found['seconds_to_first_step']:.1f} s, last {last:.0f} ms, peak {peaks} "
                f"GiB {kind}, {found['seconds']:.0f} s in all"
            )
    if "passed" not in row:
        yield f"{name}: {row.get('skipped')}"
        return
    faster = ", ".join(f"{row[key]:.2f}x {key.removeprefix('times_')}" for key in row if key.startswith("times_"))
    verdict = "passed" if row["passed"] else "FAILED"
    yield f"{name}: {verdict}, losses apart {row['largest_difference']}; {faster}"


def add_options(parser: ArgumentParser) -> None:
    """Add the device, and the older names of two options."""
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--timeout", "--limit", type=float, default=180.0, help="seconds that one side may take")


COMMAND = CaseCommand(
    case="several_gpus", help=__doc__, rows={case.name for case in (*CASES, *TINY)}, default_rows=(),
    settings=settings, table=table, tasks=tasks, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
