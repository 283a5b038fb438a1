"""What `benchmarks.unsloth_run` trains, written by this environment: weights, tokenizer, documents, arguments."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.captured import Row, documents_of
from benchmarks.lora_models import ALPHA, PROJECTIONS, RANK
from benchmarks.model_shapes import build_model, shape_of
from benchmarks.own_process import answer_of

KINDS = ("lora", "nf4", "full")
"""What its README trains; experts with adapters on their stacks are no part of it."""


def write_folder(row: Row, folder: Path, device: str, seed: int) -> None:
    """Write the base model of a row with the weights of every other side, its documents and arguments."""
    from benchmarks.side_by_side import COMMON
    from benchmarks.side_watch import MOST

    shape = replace(shape_of(row.model).cut_to(row.layers), weights=torch.bfloat16)
    model = build_model(shape, positions=row.tokens, seed=seed, device=device)
    tokenizer, documents = documents_of(row, int(model.config.get_text_config().vocab_size))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "documents.json").write_text(json.dumps(list(documents["input_ids"])), encoding="utf-8")
    arguments = {**COMMON, **row.arguments, **row.precision(device), "max_steps": MOST, "seed": seed}
    given = {
        "kind": row.kind, "tokens": row.tokens, "rank": RANK, "alpha": ALPHA, "projections": list(PROJECTIONS),
        "seed": seed, "arguments": {**arguments, "use_cpu": device != "cuda"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(given), encoding="utf-8")


def run(row: Row, name: str, seed: int, python: str, timeout: float) -> dict[str, Any]:
    """Write the folder of a row in one process and train it in another one, under another Python.

    Args:
        row: of `benchmarks.side_by_side.ROWS`.
        name: of it.
        seed: of weights and order.
        python: path of the interpreter.
        timeout: seconds of each process.
    """
    if row.kind not in KINDS:
        return {"failed": f"no {row.kind} here: it trains {', '.join(KINDS)}"}
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        written = answer_of("benchmarks.unsloth_folder", (folder, "--row", name, "--seed", seed), timeout)
        if "failed" in written:
            return written
        return answer_of("benchmarks.unsloth_run", (folder,), timeout, python=python)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.unsloth_folder FOLDER --row NAME --json FILE``."""
    from benchmarks.side_by_side import ROWS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.unsloth_folder", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--row", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    write_folder(ROWS[args.row], args.folder, "cuda" if torch.cuda.is_available() else "cpu", args.seed)
    args.json.write_text("{}", encoding="utf-8")


if __name__ == "__main__":
    main()
