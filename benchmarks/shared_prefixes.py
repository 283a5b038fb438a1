"""Whole optimizer steps on packed rows whose documents begin alike: stock, ours, and ours with each document whole.

Sides take turns, step by step, in one process, from the same weights and on the same rows; losses must agree before
times are believed. A row ``1000+200`` has documents of 1,000 shared tokens before 100 to 300 of their own; of
``completions`` the loss counts the own tokens alone; ``nothing`` shares nothing, and is looked through all the same.
``small`` models are for a CPU, where stock, whose attention is over the whole row, takes minutes for a step: ask for
it by ``--sides``.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.command import CaseCommand
from benchmarks.model_shapes import build_model, shape_of
from benchmarks.readme_cells import grid, ratio_cell
from benchmarks.step_turns import OURS, PAIR, STOCK, steps_in_turn
from benchmarks.training_side import device_here
from benchmarks.workload import make_tokenizer
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.tables import aligned, fact_lines

CASE = "shared_prefixes"
WHOLE = "each document whole"
SIDES = (STOCK, WHOLE, OURS)
WARMUP = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Documents of one kind: ``Row(1000, 200)``."""

    shared: int
    """Tokens that all of them begin with."""
    own: int
    """Their other tokens, on average."""
    completions: bool = False
    """The loss counts the own tokens alone."""
    setting: str = "auto"
    """Of `share_prefixes`."""

    def documents(self, tokens: int, vocabulary: int, seed: int) -> dict[str, list[list[int]]]:
        """Return at least `tokens` tokens in documents of random ids, and their labels."""
        draw = np.random.default_rng(seed)

        def words(count: int) -> list[int]:
            return draw.integers(2, vocabulary, count).tolist()

        prefix = words(self.shared)
        ids: list[list[int]] = []
        labels: list[list[int]] = []
        while sum(len(each) for each in ids) < tokens:
            own = words(int(draw.integers(self.own // 2, self.own * 3 // 2 + 1)))
            ids.append(prefix + own)
            labels.append([-100 if self.completions else token for token in prefix] + own)
        order = draw.permutation(len(ids)).tolist()
        return {"input_ids": [ids[place] for place in order], "labels": [labels[place] for place in order]}


ROWS = {
    "300+300": Row(300, 300), "1000+200": Row(1000, 200), "300+300 completions": Row(300, 300, completions=True),
    "1000+200 completions": Row(1000, 200, completions=True), "nothing": Row(0, 400, setting="on"),
}  # fmt: skip


def measure_row(row: Row, args: Namespace, _seconds: float = 0.0) -> dict[str, Any]:
    """Return the figures of a row, as of `steps_in_turn`."""
    from datasets import Dataset

    device = device_here()
    shape = shape_of(args.model)
    shape = replace(shape, weights=torch.bfloat16 if device == "cuda" else torch.float32)
    vocabulary, rows = int(shape.fields["vocab_size"]), args.rounds + WARMUP + 8
    given: dict[str, Any] = {
        "model": build_model(shape, positions=args.tokens, seed=args.seed, device=device),
        "processing_class": make_tokenizer(vocabulary),
        "train_dataset": Dataset.from_dict(row.documents(rows * args.tokens, vocabulary, args.seed)),
    }
    if args.lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    ours = PAIR[OURS]
    sides = {
        STOCK: PAIR[STOCK],
        WHOLE: replace(ours, changes={"share_prefixes": "off"}),
        OURS: replace(ours, changes={"share_prefixes": row.setting}),
    }
    sides = {name: side for name, side in sides.items() if name in args.sides}
    arguments = {
        "seed": args.seed, "use_cpu": device != "cuda", "bf16": device == "cuda", "logging_steps": 1, "packing": True,
        "max_length": args.tokens, "per_device_train_batch_size": 1, "learning_rate": 1e-4,
    }  # fmt: skip
    return steps_in_turn(sides, given, arguments, rounds=args.rounds, warmup=WARMUP, seed=args.seed)


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows to measure."""
    return [RowTask({"row": name}, partial(measure_row, ROWS[name], args)) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return what the rows share."""
    return {"rounds": args.rounds, "warmup": WARMUP, "model": args.model, "tokens": args.tokens, "lora": args.lora}


def options(parser: ArgumentParser) -> None:
    """Add what this case has beside the others' options."""
    on_a_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--of", dest="model", default="qwen3-0.6b" if on_a_gpu else "small", help="the model (default: %(default)s)")
    add("--tokens", type=int, default=8192, help="of a row (default: %(default)s)")
    add("--lora", action="store_true", help="LoRA of rank 16 on all projections instead of full training")


def table(record: Mapping[str, Any]) -> str:
    """Return the record for people: seconds of a step by side, how many times ours is as fast, tokens computed."""
    cells = [["row", "side", "s/step", "ours is", "tokens computed"]]
    notes: list[str] = []
    for row in record["rows"]:
        notes += [f"{row['row']}: {row['failed']}"] if "failed" in row else []
        cells += [[row["row"], *line] for line in _lines(row)]
    return "\n".join([f"{CASE}: optimizer steps on the same rows", *fact_lines(record), *aligned(cells), *notes])


def _lines(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for side, found in row.get("sides", {}).items():
        if "failed" in found:
            yield [side, found["failed"], "-", "-"]
            continue
        ratio = row["ratios"].get(side)
        share = f"{found['computed']:.0%}"
        yield [side, f"{found['seconds']['median']:.3f}", "-" if ratio is None else ratio_cell(ratio), share]


def markdown(record: Mapping[str, Any]) -> str:
    """Return the record for a page."""
    rows = []
    for row in record["rows"]:
        sides, ours = row.get("sides", {}), row.get("sides", {}).get(OURS, {})
        if "seconds" not in ours:
            continue
        seconds = [f"{sides[name]['seconds']['median']:.2f} s" if name in sides else "-" for name in SIDES]
        ratios = [ratio_cell(row["ratios"][name]) if name in row["ratios"] else "-" for name in (STOCK, WHOLE)]
        rows.append([row["row"], *seconds, *ratios, f"{ours['computed']:.0%}"])
    settings = record["settings"]
    said = (
        f"**Shared prefixes**: whole optimizer steps on packed rows of {settings['tokens']:,} tokens, model "
        f"`{settings['model']}`, {'LoRA' if settings['lora'] else 'full training'}. *300+300*: 300 shared tokens "
        "before 150 to 450 of their own; *completions*: the loss counts these alone; *nothing*: they share nothing."
    )
    head = "documents | >stock | >each whole | >prefixes once | >over stock | >over each whole | >tokens computed"
    return f"{said}\n\n{grid(head, rows)}"


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, sides=SIDES, default_sides=SIDES[1:], rounds=7,
    tasks=tasks, settings=settings, table=table, more=options,
)  # fmt: skip

main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
