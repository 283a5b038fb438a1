"""Whole optimizer steps of ``train()`` with the micro-step captured, and eager: one process per row, the sides in turn.

A side is a `FastSFTTrainer` at its defaults over the same model; they differ in ``cuda_graph`` only. Time is that of
the trainer's own loop between two steps at whose ends the device has finished, launches and the time of kernels are of
a profile of some steps after it. Real text, public shapes with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from benchmarks.gpu_profile import profile_figures
from benchmarks.lora_models import ALPHA, RANK, LoraModel, build, definitions, files
from benchmarks.model_shapes import build_model, shape_of
from benchmarks.one_line import in_one_line
from benchmarks.own_process import answer_of
from benchmarks.side_watch import peaks_gib
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter
from fastpack_trl.measure.record import make_record, write_json
from fastpack_trl.model.patches import attribute_set
from fastpack_trl.moe.quantised import quantize_experts

SIDES: dict[str, Literal["auto", "off"]] = {"eager": "off", "captured": "auto"}
"""Name and ``cuda_graph`` of each side."""
WARMUP_STEPS, TIMED_STEPS, SPANS, PROFILED_STEPS = 40, 10, 3, 4
LONGEST_DOCUMENT = 2048
"""Tokens; longer ones are cut, so that rows of 8,192 tokens hold several."""
FILE_ROWS = 70
"""Rows of long documents: more than the steps that a run of `benchmarks.side_by_side` can have."""
TIMEOUT = 560


@dataclass(frozen=True, slots=True)
class Row:
    """One model and row length."""

    model: str
    tokens: int
    kind: str
    """``lora`` (bf16 base), ``nf4``, ``full`` (bf16 weights), ``experts`` (LoRA on attention and expert stacks),
    ``nf4-experts`` (LoRA on attention, frozen expert stacks in four bits) or ``nf4-fp16`` (`as_on_a_t4`)."""
    layers: int | None = None
    unpacked: tuple[int, int] | None = None
    """Documents of a batch and batches of a step, where rows are not packed; else a packed row is a step."""
    whole_files: bool = False
    """Documents are source files of up to a row, not functions and classes of up to `LONGEST_DOCUMENT`."""

    @property
    def name(self) -> str:
        if self.unpacked is not None:
            return f"{self.model} {self.kind} {self.unpacked[0]}x{self.unpacked[1]}"
        return f"{self.model} {self.kind} {self.tokens}{' long documents' if self.whole_files else ''}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `SFTConfig` that say what a step is."""
        batch, batches = self.unpacked or (1, 1)
        return {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": batches,
            "packing": self.unpacked is None, "max_length": self.tokens,
        }  # fmt: skip

    @property
    def fp16(self) -> bool:
        """Whether it trains in fp16 under a loss scaler, as on a device without bf16."""
        return self.kind == "nf4-fp16"

    def precision(self, device: str) -> dict[str, Any]:
        """Return the arguments of `SFTConfig` that say in which dtype it trains."""
        return {"bf16": device == "cuda" and not self.fp16, "fp16": device == "cuda" and self.fp16}


SMALL = Row("small", 512, "lora")
"""For a CPU, where nothing is captured: it shows that the case runs."""

ROWS = {
    row.name: row
    for row in (
        SMALL,
        Row("qwen3-0.6b", 2048, "lora"), Row("qwen3-0.6b", 8192, "lora"), Row("llama-3.2-1b", 2048, "full"),
        Row("qwen3-8b", 4096, "lora"), Row("qwen3-14b", 4096, "nf4"), Row("gpt-oss-20b", 4096, "experts", 4),
        Row("small", 512, "lora", unpacked=(2, 4)), Row("qwen3-0.6b", 1024, "lora", unpacked=(2, 4)),
        Row("qwen3-8b", 1024, "lora", unpacked=(2, 4)), Row("small", 512, "nf4-fp16", unpacked=(2, 4)),
        Row("qwen3-0.6b", 1024, "nf4-fp16", unpacked=(2, 4)), Row("qwen3-8b", 1024, "nf4-fp16", unpacked=(2, 4)),
    )
}  # fmt: skip


class Watch(TrainerCallback):
    """Times spans of steps of a run, then profiles a few."""

    def __init__(self, profile: bool) -> None:
        self.seconds: list[float] = []
        self.first_step = self._start = time.perf_counter()
        self.profile: dict[str, float] = {}
        self.held_gib = 0.0
        self._profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
        self._profiles = profile

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - WARMUP_STEPS
        if state.global_step == 1:
            _wait()
            self.first_step = time.perf_counter() - self.first_step
        if done < 0 or done % TIMED_STEPS:
            self._profiled(done)
            return
        _wait()
        now = time.perf_counter()
        if 0 < done <= SPANS * TIMED_STEPS:
            self.seconds.append((now - self._start) / TIMED_STEPS)
        if done == SPANS * TIMED_STEPS and self._profiles:
            self.held_gib = torch.cuda.memory_reserved() / 2**30
            self._profiler.start()
        self._start = time.perf_counter()

    def _profiled(self, done: int) -> None:
        if not self._profiles or done != SPANS * TIMED_STEPS + PROFILED_STEPS:
            return
        _wait()
        self._profiler.stop()
        self.profile = profile_figures(self._profiler.events() or (), PROFILED_STEPS)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_of(row: Row, positions: int, device: str, seed: int) -> tuple[Any, Any]:
    """Return the model of `row` for rows of up to so many tokens, and the adapters that a trainer is to put in."""
    if row.kind in ("lora", "nf4", "nf4-fp16"):
        base = "bf16" if row.kind == "lora" else row.kind
        return build(LoraModel(row.model, base), layers=row.layers, positions=positions, seed=seed, device=device), None
    shape = replace(shape_of(row.model).cut_to(row.layers), weights=torch.bfloat16)
    model = build_model(shape, positions=positions, seed=seed, device=device)
    if row.kind == "full":
        return model, None
    from peft import LoraConfig

    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if row.kind == "experts" else None
    if row.kind == "nf4-experts":
        quantize_experts(model.requires_grad_(False))
    return model, LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=stacks
    )


@contextlib.contextmanager
def as_on_a_t4(row: Row) -> Iterator[None]:
    """Let devices say, for rows in fp16, that their compute capability is 7.5; both sides choose by it."""
    if not row.fp16:
        yield
        return
    if torch.cuda.is_available():
        from triton.runtime import driver

        driver.active.get_current_target()  # Triton 3.6 asks the same function: it has to compile for the real device
    with attribute_set(torch.cuda, "get_device_capability", lambda device=None: (7, 5)):
        yield


def scalable(trainer: Any) -> Any:
    """Return the trainer, its adapters in fp32 where stock would end in its first step: no kernel unscales bf16."""
    for parameter in trainer.model.parameters() if trainer.args.fp16 else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def documents_of(row: Row, vocabulary: int) -> tuple[Any, Any]:
    """Return the tokenizer and the documents of `row`."""
    if row.whole_files:
        return files(row.tokens * FILE_ROWS, vocabulary, row.tokens)
    return definitions(row.tokens * 120, vocabulary, min(row.tokens, LONGEST_DOCUMENT))


def material(row: Row, device: str, seed: int) -> dict[str, Any]:
    """Return a trainer's model, data, tokenizer and adapters for `row`."""
    model, peft_config = model_of(row, row.tokens, device, seed)
    tokenizer, documents = documents_of(row, int(model.config.get_text_config().vocab_size))
    return {
        "model": model, "train_dataset": documents, "processing_class": tokenizer, "peft_config": peft_config,
    }  # fmt: skip


def measure_side(row: Row, side: str, device: str, seed: int, given: dict[str, Any]) -> dict[str, Any]:
    """Train one side of one row; return its figures."""
    from fastpack_trl import FastSFTConfig, FastSFTTrainer

    free_memory(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = WARMUP_STEPS + SPANS * TIMED_STEPS + PROFILED_STEPS + 1
    watch = Watch(profile=device == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        args = FastSFTConfig(
            output_dir=folder, max_steps=LONG_RUN, learning_rate=1e-4, logging_steps=20, save_strategy="no",
            report_to="none", seed=seed, disable_tqdm=True, use_cpu=device != "cuda", cuda_graph=SIDES[side],
            **row.precision(device), **row.arguments,
        )  # fmt: skip
        trainer = FastSFTTrainer(args=args, callbacks=[watch, EndsAfter(steps)], **given)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "step_seconds": watch.seconds, "first_step_seconds": watch.first_step, "profile": watch.profile,
        "losses": losses, **peaks_gib(device), "held_gib": watch.held_gib, "report": trainer.fastpack_report.to_dict(),
    }  # fmt: skip


def measure_row(row: Row, rounds: int, device: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Train both sides of a row in this process, in alternating order from round to round."""
    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    given = material(row, device, seed)
    for number in range(rounds):
        for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
            if given["peft_config"] is not None and any(sides.values()):
                given = material(row, device, seed)  # a trainer has put adapters into the last
            sides[side].append(measure_side(row, side, device, seed, given))
    return sides


def measure(rows: Sequence[str], *, rounds: int, seed: int, progress: bool = True) -> list[dict[str, Any]]:
    """Measure rows by name, each in a process of its own.

    Raises:
        UserError: a row that does not exist.
    """
    out = []
    for name in rows:
        if name not in ROWS:
            raise UserError(f"there is no row {name!r}{did_you_mean(name, ROWS)} (rows: {', '.join(ROWS)})")
        arguments = (name, "--alone", "--rounds", rounds, "--seed", seed)
        sides = answer_of("benchmarks.captured", arguments, TIMEOUT)
        if "failed" in sides:
            sides = {side: [sides] for side in SIDES}
        for side, found in ((side, found) for side, all_found in sides.items() for found in all_found):
            if progress:
                print(_line(name, side, found), flush=True)
        out.append({"row": name, "sides": sides})
    return out


def _line(row: str, side: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{row:24} {side:9} failed: {found['failed']}"
    profile = found["profile"]
    said = found["report"]["features"].get("cuda_graph", {})
    step = median(found["step_seconds"])
    idle = 1 - profile.get("busy_seconds", step) / step
    gib = " of ".join(f"{found[name] or 0:.1f}" for name in ("peak_gib", "reserved_gib", "held_gib"))
    return (
        f"{row:24} {side:9} {step * 1e3:7.1f} ms a step, kernels {profile.get('busy_seconds', 0) * 1e3:.1f} ms, idle "
        f"{idle:.0%}, {profile.get('launches', 0):.0f} launches, {profile.get('waits', 0):.1f} waits, {gib} GiB, first "
        f"step {found['first_step_seconds']:.1f} s, losses {found['losses']}; {said.get('path')}: {said.get('reason')}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.captured``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.captured", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)} (default: all of packed rows but {SMALL.name})")
    parser.add_argument("--rounds", type=int, default=1, help="trainings per side and row (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.alone:  # in the process of one row
        found = measure_row(ROWS[args.rows[0]], args.rounds, device, args.seed)
        Path(args.json).write_text(json.dumps(found), encoding="utf-8")
        return
    names = args.rows or [name for name, row in ROWS.items() if row != SMALL and row.unpacked is None]
    rows = measure(names, rounds=args.rounds, seed=args.seed)
    settings = {
        "warmup_steps": WARMUP_STEPS, "timed_steps": TIMED_STEPS, "spans": SPANS, "profiled_steps": PROFILED_STEPS,
        "rounds": args.rounds, "sides": SIDES, "longest_document": LONGEST_DOCUMENT,
    }  # fmt: skip
    record = make_record(
        case="captured", settings=settings, rows=rows, complete=True, device=device, threads=torch.get_num_threads(),
        seed=args.seed,
    )  # fmt: skip
    if args.json is not None:
        write_json(Path(args.json), record)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.captured", main))
