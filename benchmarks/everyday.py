"""Optimizer steps of runs as most people begin: rows that are not packed, small batches, accumulation; any machine.

Stock and ours at its defaults take turns, one optimizer step of each (`fastpack_trl.bench.compare`), first steps left
out: `benchmarks.first_step` has those. Many small layers, so that what is measured is the work around the products.

Each side trains in a thread, with OpenMP threads of its own. Where they are more than the cores, they sleep after each
operation, and to wake them takes longer than a small one: so one thread is the default. Each of several cells is
measured in a process of its own, as a run is: what the allocator has learnt from one changes the times of the next.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from benchmarks.lora_models import definitions
from benchmarks.one_line import in_one_line
from benchmarks.own_process import answer_of
from fastpack_trl.bench.compare import compare
from fastpack_trl.bench.environment import limited_threads
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.record import make_record, write_json

SHORTEST, LONGEST = 60, 240
"""Tokens of a document."""
DOCUMENTS = 400
VOCABULARY = 2048
SIDES = ("stock", "fastpack_plan")
_OPTIONS = ("pairs", "seed", "layers", "hidden")
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


def measure(
    cells: Sequence[str], *, pairs: int, seed: int, layers: int = 28, hidden: int = 32, progress: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield a row of `compare` for each of `cells`, with its ratio printed.

    Raises:
        UserError: a cell that does not exist.
    """
    known = _known(cells)
    tokenizer, rows = documents(seed)
    for name in known:
        cell = CELLS[name]
        with tempfile.TemporaryDirectory() as folder:

            def build(
                trainer: type[SFTTrainer],
                config: type[SFTConfig],
                *,
                folder: str = folder,
                cell: Cell = cell,
                **changes: Any,
            ) -> SFTTrainer:
                torch.manual_seed(seed)
                options = {
                    "output_dir": folder, "per_device_train_batch_size": cell.batch, "max_length": LONGEST,
                    "gradient_accumulation_steps": cell.accumulation, "gradient_checkpointing": cell.checkpointing,
                    "save_strategy": "no", "report_to": "none", "bf16": torch.cuda.is_available(),
                    "use_cpu": not torch.cuda.is_available(), "max_steps": 200, "logging_steps": 10,
                }  # fmt: skip
                return trainer(
                    model(layers, hidden), args=config(**(options | changes)), train_dataset=rows,
                    processing_class=tokenizer,
                    peft_config=LoraConfig(r=8, target_modules="all-linear") if cell.lora else None,
                )  # fmt: skip

            (row,) = compare(build, pairs=pairs, seed=seed, sides=SIDES, progress=False)["rows"]
        found = {"cell": name, **row}
        if progress:
            _say(found)
        yield found


def _known(cells: Sequence[str]) -> Sequence[str]:
    for name in cells:
        if name not in CELLS:
            raise UserError(f"there is no cell {name!r}{did_you_mean(name, CELLS)} (cells: {', '.join(CELLS)})")
    return cells


def _in_a_process(cell: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one cell, measured in a process of its own."""
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    found = answer_of("benchmarks.everyday", [cell, *flags], _MOST_SECONDS)
    if "failed" in found:
        raise UserError(f"{cell}: {found['failed']}")
    (row,) = found["rows"]
    _say(row)
    return dict(row)


def _say(row: dict[str, Any]) -> None:
    ratio = row["ratios"]["stock"]
    times = " ".join(f"{side} {row['sides'][side]['seconds']['median'] * 1e3:.0f} ms" for side in SIDES)
    said = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    print(f"{row['cell']:24} {times} a step, stock/fastpack {said}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.everyday``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.everyday", description=__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=9, help="timed steps of each side (default: 9)")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE")
    parser.add_argument("--threads", metavar="N", type=int, default=1, help="CPU threads of each side (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    cells, options = args.cells or list(CELLS), {name: getattr(args, name) for name in _OPTIONS}
    if len(cells) == 1:
        with limited_threads(args.threads):
            rows = list(measure(cells, **options))
    else:
        rows = [_in_a_process(cell, options | {"threads": args.threads}) for cell in _known(cells)]
    settings = {
        "pairs": args.pairs, "layers": args.layers, "hidden": args.hidden, "sides": list(SIDES),
        "document_tokens": [SHORTEST, LONGEST],
    }  # fmt: skip
    record = make_record(
        case="everyday", settings=settings, rows=rows, complete=True,
        device="cuda" if torch.cuda.is_available() else "cpu", threads=args.threads, seed=args.seed,
    )  # fmt: skip
    if args.json is not None:
        write_json(Path(args.json), record)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.everyday", main))
