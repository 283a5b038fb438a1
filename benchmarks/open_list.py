"""What has no figure yet, as one list of commands: planned rows that no record has, and rows that one left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import memory_caps
from benchmarks.record_commands import begun, command_of
from benchmarks.side_by_side import DEFAULT_SIDES, UNSLOTH
from benchmarks.training_rows import FIRST
from benchmarks.training_side import EAGER, OURS, SAME_MEMORY

Results = Mapping[str, Mapping[str, Any]]

LIGER = "stock + Liger"
EVERYDAY = ("qwen3-0.6b lora 2x4", "qwen3-8b lora 2x4")
LARGE = ("qwen3-30b-a3b experts 4096", "qwen3-32b nf4 2048", "qwen3-8b lora 32768 long documents")
THREE = ("qwen3-0.6b lora 8192", "qwen3-8b lora 4096", "qwen3-14b nf4 4096")


@dataclass(frozen=True, slots=True)
class Planned:
    """Rows of one case: ``Planned("side_by_side", "six rows", ("qwen3-8b lora 4096",), ("stock", "fastpack"))``.

    Attributes:
        sides: of each row, where a row has a run for each.
    """

    case: str
    what: str
    rows: Sequence[str]
    sides: Sequence[str] = ()
    more: str = ""

    def missing(self, done: set[tuple[str, str, str]]) -> list[tuple[str, str]]:
        """Return the rows and sides that no record has."""
        return [pair for pair in product(self.rows, self.sides or ("",)) if (self.case, *pair) not in done]

    def command(self, missing: Sequence[tuple[str, str]]) -> str:
        """Return the command of some of the rows and sides."""
        rows, sides = (
            " ".join(f'"{one}"' if " " in one else one for one in dict.fromkeys(column)).strip()
            for column in zip(*missing, strict=True)
        )
        words = [f"python -m benchmarks.{self.case}", self.more, f"--rows {rows}", f"--sides {sides}" * bool(sides)]
        return " ".join(filter(None, (*words, "--json FILE")))


PLANNED = (
    Planned("side_by_side", "six rows beside stock and stock compiled", FIRST, DEFAULT_SIDES, "--rounds 2"),
    Planned("row_profile", "where the device's time of these rows goes", FIRST, (OURS,)),
    Planned("side_by_side", "without packing: batch 2, accumulation 4", EVERYDAY, DEFAULT_SIDES, "--rounds 2"),
    Planned("side_by_side", "in stock's memory", FIRST, (SAME_MEMORY,), "--rounds 1"),
    Planned("side_by_side", "larger models and long documents", LARGE, DEFAULT_SIDES, "--rounds 1"),
    Planned("side_by_side", "with Liger's kernels", THREE, (LIGER,), "--rounds 1"),
    Planned("side_by_side", "Unsloth", THREE, (UNSLOTH,), "--unsloth PYTHON --rounds 1"),
    Planned("side_by_side", "a step not as one graph", FIRST[-1:], (EAGER,), "--rounds 2"),
    Planned("memory_caps", "the largest rows under caps", memory_caps.LARGE, ("stock", OURS)),
)  # fmt: skip
"""For one GPU, from the most to the least worth."""
PLANNED_CASES = {plan.case for plan in PLANNED}
"""Whose rows without a figure are in the list by what is planned."""


def open_list(results: Results) -> list[str]:
    """Return one paragraph of Markdown with what is open; none where nothing is."""
    done = set(measured(results))
    lines = []
    for plan in PLANNED:
        missing = plan.missing(done)
        if missing:
            lines.append(f"- {plan.what}: `{plan.command(missing)}`")
    for name, record in results.items():
        rows = begun(record)
        left_out = sum(isinstance(row.get("skipped"), str) for row in rows)  # why; of cuda_tests, how many tests
        if left_out and record["case"] not in PLANNED_CASES:
            lines.append(f"- {left_out} of {len(rows)} rows of `{name}`: `{command_of(record)}`")
        if not record["complete"]:
            lines.append(f"- what came after the rows of `{name}`, which was stopped: `{command_of(record)}`")
    lines.append("- on two GPUs: `python -m benchmarks.several_gpus --json FILE`")
    head = (
        "**Open.** In no record yet, for a GPU. A command that was stopped goes on with its file. Commands of records "
        "of older code are printed by `python -m benchmarks.stale`."
    )
    return ["\n".join([head, "", *lines])]


def measured(results: Results) -> Iterator[tuple[str, str, str]]:
    """Yield case, row and side of all that was measured on a GPU; a side that failed has a row with its error."""
    for record in results.values():
        if record["machine"]["device"] != "cuda":
            continue
        for row in record["rows"]:
            name = str(row.get("row") or row.get("model") or row.get("name"))
            if row.get("skipped"):
                continue
            sides = row["sides"] if "sides" in row else [row.get("side", "")]
            yield from ((record["case"], name, str(side)) for side in ("", *sides))
