"""Which records are of older code than this checkout's, why, and the command of each: ``python -m benchmarks.stale``.

A record has a hash of each room of the package; `rooms_of` says which of them its rows use. Its hash of the benchmarks
says what measured it, and makes no record old. A record without hashes is of the code before there were any. What is
stale is printed and not written into a page, so that a change of the product asks nobody to rewrite one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.record_commands import command_of
from benchmarks.results_folder import RESULTS, load_results
from fastpack_trl.measure.code_hash import BENCHMARKS, code_hashes

Record = Mapping[str, Any]
Hashes = Mapping[str, str]

TRAINING = (
    "attention", "callbacks", "capture", "checkpointing", "compile", "config.py", "features.py", "kernels", "lora",
    "measure", "model", "packing", "run", "step", "trainer.py",
)  # fmt: skip
"""Of a training with `FastSFTTrainer`; ``moe`` too where the model has experts."""
_TRAININGS = (
    "equal_memory", "first_step", "fp8_accuracy", "fp8_steps", "host_overhead", "memory_caps",
    "row_profile", "several_gpus", "shared_prefixes", "side_by_side",
)  # fmt: skip
ROOMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TRAININGS, TRAINING),
    "activation_memory": ("attention", "checkpointing", "kernels", "model", "packing"),
    "by_itself": ("attention", "checkpointing", "kernels", "model", "moe", "packing"),
    "collator": ("packing",),
    "hybrid": ("attention", "compile", "kernels", "model", "packing", "recurrent"),
    "moe": ("attention", "kernels", "model", "moe", "packing"),
    "preference": (*TRAINING, "trainers"),
}
"""Rooms of the package by case; a case that is not here uses all."""
OPTIMISATIONS = {
    "metadata": ("attention", "model", "packing"),
    "reload": ("attention", "checkpointing", "model", "packing"),
    "routing": ("attention", "kernels", "model", "moe", "packing"),
}
"""Of the rooms of ``by_itself``, those of each of its records."""
_EXPERTS = re.compile(r"gpt.oss|moe|a3b|experts", re.IGNORECASE)
_NAMES = ("model", "row", "name", "setting")
"""Keys of a row that say what model it is about."""


class Stale(NamedTuple):
    """One record of older code: its file, why, and the command that measures it again."""

    name: str
    why: str
    command: str


def rooms_of(record: Record) -> tuple[str, ...]:
    """Return the rooms of the package that the rows of a record use."""
    if record["case"] == "by_itself":
        return OPTIMISATIONS[record["settings"]["optimisation"]]
    case = "side_by_side" if record["case"] == "captured" else record["case"]  # which became sides of the other
    rooms = ROOMS.get(case) or tuple(room for room in code_hashes() if room != BENCHMARKS)
    experts = any(_EXPERTS.search(str(row.get(key))) for row in record["rows"] for key in _NAMES)
    return (*rooms, "moe") if experts and rooms is TRAINING else rooms


def reason(record: Record, today: Hashes) -> str | None:
    """Return why a record is of older code; None if it is of today's, the hashes of whose rooms are given."""
    commit, then = record["source"]["commit"], record.get("code")
    if then is None:
        return f"of commit {commit[:7]}, when records had no hashes of their code" if commit else "of unknown code"
    changed = [room for room in rooms_of(record) if then.get(room) != today.get(room)]
    at = f" since {commit[:7]}" if commit else ""
    return f"changed{at}: {', '.join(changed)}" if changed else None


def stale(results: Mapping[str, Record], today: Hashes) -> Iterator[Stale]:
    """Yield the records that are of older code; `today` is of `reason`."""
    for name, record in results.items():
        why = reason(record, today)
        if why is not None:
            yield Stale(name, why, command_of(record))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.stale``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale", description=__doc__)
    parser.parse_args(arguments)
    results = load_results()
    found = list(stale(results, code_hashes()))
    for one in found:
        print(f"{(RESULTS / one.name).relative_to(RESULTS.parents[1])}\n  {one.why}\n  {one.command}")
    print(summed_up(len(found), len(results)))


def summed_up(older: int, records: int) -> str:
    """Return how many of `records` are of older code, with the remedy."""
    return f"{older} of {records} records are of older code{': run these commands again' if older else ''}"


if __name__ == "__main__":
    main()
