"""Optimizer steps of runs as most people begin: rows that are not packed, small batches, accumulation; any machine.

Stock and ours at its defaults take turns, one optimizer step of each (`fastpack_trl.bench.compare`), first steps left
out: `benchmarks.first_step` has those. Many small layers, so that what is measured is the work around the products.

Each side trains in a thread, with OpenMP threads of its own. Where they are more than the cores, they sleep after each
operation, and to wake them takes longer than a small one: so one thread is the default. Each of several cells is
measured in a process of its own, as a run is: what the allocator has learnt from one changes the times of the next.
"""

from __future__ import annotations

import random
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from benchmarks.command import CaseCommand
from benchmarks.lora_models import definitions
from fastpack_trl.bench.compare import compare
from fastpack_trl.bench.environment import limited_threads
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.training_run import OwnProcess

CASE = "everyday"
SHORTEST, LONGEST = 60, 240
"""Tokens of a document."""
DOCUMENTS = 400
VOCABULARY = 2048
SIDES = ("stock", "fastpack_plan")
_OPTIONS = ("rounds", "seed", "layers", "hidden", "threads")
_MOST_SECONDS = 900.0
"""Of one cell in a process of its own."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train."""

    batch: int
    accumulation: int
    lora: bool
    checkpointing: bool

    @property
    def name(self) -> str:
        """As on the command line: ``1x8-lora``."""
        kind = "lora" if self.lora else "full"
        return f"{self.batch}x{self.accumulation}-{kind}{'-checkpointing' if self.checkpointing else ''}"


CELLS = {
    cell.name: cell
    for cell in (
        Cell(1, 8, lora=True, checkpointing=False),
        *(Cell(*each) for each in product((1, 2, 4), (1, 4), (True, False), (False, True))),
    )
}


def documents(seed: int) -> tuple[Any, Dataset]:
    """Return a tokenizer, and definitions of the standard library cut to `SHORTEST` to `LONGEST` tokens."""
    tokenizer, whole = definitions(DOCUMENTS * LONGEST * 2, VOCABULARY, LONGEST)
    draw = random.Random(seed)
    long_enough = (ids for ids in whole["input_ids"] if len(ids) >= SHORTEST)
    rows = [ids[: draw.randint(SHORTEST, LONGEST)] for ids in long_enough][:DOCUMENTS]
    return tokenizer, Dataset.from_dict({"input_ids": rows})


def model(layers: int, hidden: int) -> LlamaForCausalLM:
    """Return a decoder of narrow layers with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def measure_cell(
    row: Mapping[str, Any], side: str, *, rounds: int, seed: int, layers: int, hidden: int, threads: int
) -> dict[str, Any]:
    """Compare both sides of a cell in this process; return its row of `compare`."""
    cell = CELLS[row["cell"]]
    tokenizer, rows = documents(seed)

    def build(trainer: type[SFTTrainer], config: type[SFTConfig], **changes: Any) -> SFTTrainer:
        torch.manual_seed(seed)
        options = {
            "output_dir": folder, "per_device_train_batch_size": cell.batch, "max_length": LONGEST,
            "gradient_accumulation_steps": cell.accumulation, "gradient_checkpointing": cell.checkpointing,
            "save_strategy": "no", "report_to": "none", "bf16": torch.cuda.is_available(),
            "use_cpu": not torch.cuda.is_available(), "max_steps": 200, "logging_steps": 10,
        }  # fmt: skip
        return trainer(
            model(layers, hidden), args=config(**(options | changes)), train_dataset=rows, processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules="all-linear") if cell.lora else None,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder, limited_threads(threads):
        (found,) = compare(build, pairs=rounds, seed=seed, sides=SIDES, progress=False)["rows"]
    return dict(found)


def tasks(args: Namespace) -> list[RowTask]:
    """Return the cells; each has a process of its own."""
    options = {name: getattr(args, name) for name in _OPTIONS}
    here = OwnProcess("benchmarks.everyday:measure_cell", options, timeout=_MOST_SECONDS)

    def measure(label: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        found = here(label, "both")
        return {"skipped": found["failed"]} if "failed" in found else found

    return [RowTask({"cell": cell}, partial(measure, {"cell": cell})) for cell in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return how much is measured of which model."""
    return {
        "pairs": args.rounds, "layers": args.layers, "hidden": args.hidden, "sides": list(SIDES),
        "document_tokens": [SHORTEST, LONGEST],
    }  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Return a line per cell: milliseconds of a step, and stock's over fastpack's."""
    return "\n".join(map(_line, record["rows"]))


def _line(row: Mapping[str, Any]) -> str:
    if row.get("skipped"):
        return f"{row['cell']:24} {row['skipped']}"
    ratio = row["ratios"]["stock"]
    times = " ".join(f"{side} {row['sides'][side]['seconds']['median'] * 1e3:.0f} ms" for side in SIDES)
    said = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{row['cell']:24} {times} a step, stock/fastpack {said}"


def add_options(parser: ArgumentParser) -> None:
    """Add the sizes of the model, and the threads."""
    add = parser.add_argument
    add("--layers", type=int, default=28)
    add("--hidden", type=int, default=32)
    add("--threads", metavar="N", type=int, default=1, help="CPU threads of each side (default: 1)")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=CELLS, rounds=9, tasks=tasks,
    settings=settings, table=table, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
