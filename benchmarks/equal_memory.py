"""NF4 LoRA at equal memory: stock with compiled layers and checkpointing, then ours with no more than its peak.

One process per run. The peak is that of all of ``train()``, start-up included. Ours is given the baseline's peak less
model, gradients and optimizer state as ``activation_memory_gib``, and once more with a corrected budget where its
own peak is off. Real text, public shapes with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import captured
from benchmarks.captured import Row, Watch, material
from benchmarks.one_line import in_one_line
from benchmarks.own_process import answer_of
from benchmarks.side_watch import peaks_gib
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.long_run import LONG_RUN, EndsAfter
from fastpack_trl.measure.record import make_record, write_json

OURS, BASELINES = "fastpack", ("compiled", "stock")
ROWS = {row.name: row for row in (Row("qwen3-14b", 4096, "nf4"), Row("qwen3-8b", 4096, "nf4"))}
EXCESS, SHORTFALL = 0.01, 0.05
"""Shares of the baseline's peak by which ours may be over it, and under it before it is given more."""
TRIES = 3
TIMEOUT = 400


def measure_side(row: Row, side: str, peak_gib: float, less_gib: float, device: str, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures.

    Args:
        row: model and row length.
        side: ``stock``, ``compiled`` or ``fastpack``.
        peak_gib: for ``fastpack``, GiB that all may take together.
        less_gib: GiB to leave of these, as earlier runs were over them.
        device: ``cpu`` or ``cuda``.
        seed: of weights and order.
    """
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl import FastSFTConfig, FastSFTTrainer
    from fastpack_trl.bench.baselines import compiled_regions
    from fastpack_trl.checkpointing.activation_memory import memory_to_come

    torch.set_num_threads(max(1, min(8, torch.get_num_threads())))
    given = material(row, device, seed)
    steps = captured.WARMUP_STEPS + captured.SPANS * captured.TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "output_dir": folder, "max_steps": LONG_RUN, "learning_rate": 1e-4, "logging_steps": 10,
            "save_strategy": "no", "report_to": "none", "seed": seed, "disable_tqdm": True, "bf16": device == "cuda",
            "use_cpu": device != "cuda", "gradient_checkpointing": True, **row.arguments,
        }  # fmt: skip
        watch = Watch(profile=False)
        given["callbacks"] = [watch, EndsAfter(steps)]
        found: dict[str, Any] = {}
        trainer: Any
        around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if side == OURS:
            trainer = FastSFTTrainer(args=FastSFTConfig(**arguments), **given)
            fixed = _allocated(device) + memory_to_come(trainer.fastpack_run) / 2**30
            found["budget_gib"] = peak_gib - fixed - less_gib
            trainer.args.activation_memory_gib = found["budget_gib"]
        else:
            trainer = SFTTrainer(args=SFTConfig(**arguments), **given)
            if side == "compiled":
                around = compiled_regions(trainer)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with around:
            trainer.train()
    if side == OURS:
        found["report"] = trainer.fastpack_report.to_dict()
    return found | {
        "step_seconds": watch.seconds, "first_step_seconds": watch.first_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **peaks_gib(device),
    }  # fmt: skip


def _allocated(device: str) -> float:
    return torch.cuda.memory_allocated() / 2**30 if device == "cuda" else 0.0


def is_equal(peak_gib: float, ours: dict[str, Any]) -> bool:
    """Return whether a run of ours is at the baseline's peak: not over it, and under it only where it needs no more."""
    excess = ours["peak_gib"] / peak_gib - 1
    return excess <= EXCESS and (excess >= -SHORTFALL or _keeps_all(ours))


def best_of(peak_gib: float, tries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest run of ours that is not over the baseline's peak; None where all are."""
    good = [run for run in tries if "failed" not in run and run["peak_gib"] <= peak_gib * (1 + EXCESS)]
    return min(good, key=lambda run: median(run["step_seconds"]), default=None)


def _keeps_all(ours: dict[str, Any]) -> bool:
    """Return whether nothing is recomputed and no weight dequantised again: more memory would not be used."""
    features = ours["report"]["features"]
    return features["activation_memory"]["path"] == "keep" and features["cache_dequantized"]["path"] == "kept"


def measure(
    rows: Sequence[str], *, baseline: str, rounds: int, seed: int, progress: bool = True
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure rows by name: the baseline, then ours until it is at the baseline's peak; repeated `rounds` times.

    Raises:
        UserError: a row that does not exist.
    """
    out = []
    for name in rows:
        if name not in ROWS:
            raise UserError(f"there is no row {name!r}{did_you_mean(name, ROWS)} (rows: {', '.join(ROWS)})")
        less, pairs = 0.0, []
        for _ in range(rounds):
            stock = _in_a_process(name, baseline, 0.0, 0.0, seed)
            _say(progress, name, baseline, stock)
            pair: dict[str, Any] = {"baseline": stock, "tries": []}
            pairs.append(pair)
            for _ in range(TRIES if "failed" not in stock else 0):
                ours = _in_a_process(name, OURS, stock["peak_gib"], less, seed)
                _say(progress, name, OURS, ours)
                pair["tries"].append(ours)
                if "failed" in ours or is_equal(stock["peak_gib"], ours):
                    break
                less += ours["peak_gib"] - stock["peak_gib"]
            best = None if "failed" in stock else best_of(stock["peak_gib"], pair["tries"])
            pair["ratio"] = best and median(stock["step_seconds"]) / median(best["step_seconds"])
            if progress and best is not None:
                print(
                    f"{name}: {pair['ratio']:.2f}x {baseline} (torch {torch.__version__}), peaks "
                    f"{best['peak_gib']:.1f} and {stock['peak_gib']:.1f} GiB",
                    flush=True,
                )
        out.append({"row": name, "baseline": baseline, "pairs": pairs})
    return out


def _in_a_process(row: str, side: str, peak_gib: float, less_gib: float, seed: int) -> dict[str, Any]:
    budget = ("--peak-gib", peak_gib, "--less-gib", less_gib)
    return answer_of("benchmarks.equal_memory", (row, "--side", side, "--seed", seed, *budget), TIMEOUT)


def _say(progress: bool, row: str, side: str, found: dict[str, Any]) -> None:
    if not progress:
        return
    if "failed" in found:
        print(f"{row:20} {side:9} failed: {found['failed']}", flush=True)
        return
    step = median(found["step_seconds"])
    more = ""
    if side == OURS:
        said = found["report"]["features"]
        reasons = "; ".join(f"{name}: {said[name]['reason']}" for name in ("activation_memory", "cache_dequantized"))
        more = f", budget {found['budget_gib']:.1f} GiB; {reasons}"
    print(
        f"{row:20} {side:9} {step * 1e3:7.1f} ms a step, {ROWS[row].tokens / step:,.0f} tokens/s, peak "
        f"{found['peak_gib']:.1f} of {found['reserved_gib']:.1f} GiB, losses {found['losses']}{more}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.equal_memory``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_memory", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--baseline", choices=BASELINES, default=BASELINES[0], help="default: its layers compiled")
    parser.add_argument("--rounds", type=int, default=1, help="baseline and ours so many times (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--peak-gib", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--less-gib", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.equal_memory measures device memory: it needs a CUDA device")
    if args.side is not None:  # in the process of one side
        found = measure_side(ROWS[args.rows[0]], args.side, args.peak_gib, args.less_gib, "cuda", args.seed)
        Path(args.json).write_text(json.dumps(found), encoding="utf-8")
        return
    rows = measure(args.rows or list(ROWS), baseline=args.baseline, rounds=args.rounds, seed=args.seed)
    settings = {
        "warmup_steps": captured.WARMUP_STEPS, "timed_steps": captured.TIMED_STEPS, "spans": captured.SPANS,
        "rounds": args.rounds, "excess": EXCESS, "shortfall": SHORTFALL,
    }  # fmt: skip
    record = make_record(
        case="equal_memory", settings=settings, rows=rows, complete=True, device="cuda",
        threads=torch.get_num_threads(), seed=args.seed,
    )  # fmt: skip
    if args.json is not None:
        write_json(Path(args.json), record)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.equal_memory", main))
