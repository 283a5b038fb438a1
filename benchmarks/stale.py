"""Which records are of older code than this checkout's, why, and the command of each: ``python -m benchmarks.stale``.

A record has a hash of each room of the package; `rooms_of` says which of them its rows use. Its hash of the benchmarks
says what measured it, and makes no record old. Older records have their commit only: its hashes are computed from git,
where the clone has the history. What is stale is printed and not written into a page, so that a change of the product
asks nobody to rewrite one.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record_commands import command_of
from benchmarks.results_folder import RESULTS, load_results
from fastpack_trl.measure.code_hash import BENCHMARKS, code_hashes, hashes_of

Record = Mapping[str, Any]
Hashes = Mapping[str, str]

TRAINING = (
    "attention", "callbacks", "capture", "checkpointing", "compile", "config.py", "features.py", "kernels", "lora",
    "measure", "model", "packing", "run", "step", "trainer.py",
)  # fmt: skip
"""Of a training with `FastSFTTrainer`; ``moe`` too where the model has experts."""
_TRAININGS = (
    "captured", "equal_memory", "everyday", "first_step", "fp8_accuracy", "fp8_steps", "host_overhead",
    "lora", "memory_caps", "packed_attention", "row_profile", "several_gpus", "side_by_side",
)  # fmt: skip
ROOMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TRAININGS, TRAINING),
    "activation_memory": ("attention", "checkpointing", "kernels", "model", "packing"),
    "attention": ("attention", "kernels", "model", "packing"),
    "by_itself": ("attention", "checkpointing", "kernels", "model", "moe", "packing"),
    "collator": ("packing",),
    "fp8_products": ("kernels", "measure"),
    "moe": ("attention", "kernels", "model", "moe", "packing"),
    "nf4": ("kernels",),
}
"""Rooms of the package by case; a case that is not here uses all."""
OPTIMISATIONS = {
    "metadata": ("attention", "model", "packing"),
    "reload": ("attention", "checkpointing", "model", "packing"),
    "routing": ("attention", "kernels", "model", "moe", "packing"),
}
"""Of the rooms of ``by_itself``, those of each of its records."""
_EXPERTS = re.compile(r"gpt.oss|moe|a3b|experts", re.IGNORECASE)
_UNKNOWN = "unknown: "
_NAMES = ("model", "row", "name", "setting")
"""Keys of a row that say what model it is about."""


class Stale(NamedTuple):
    """One record of older or unknown code: its file, why, and the command that measures it again."""

    name: str
    why: str
    command: str

    @property
    def unknown(self) -> bool:
        """Return whether this clone does not have the commit of the record."""
        return self.why.startswith(_UNKNOWN)


def rooms_of(record: Record) -> tuple[str, ...]:
    """Return the rooms of the package that the rows of a record use."""
    if record["case"] == "by_itself":
        return OPTIMISATIONS[record["settings"]["optimisation"]]
    rooms = ROOMS.get(record["case"]) or tuple(room for room in code_hashes() if room != BENCHMARKS)
    experts = any(_EXPERTS.search(str(row.get(key))) for row in record["rows"] for key in _NAMES)
    return (*rooms, "moe") if experts and rooms is TRAINING else rooms


def reason(record: Record, today: Hashes, at_commit: Callable[[str], Hashes | None]) -> str | None:
    """Return why a record is of older code; None if it is of today's.

    Args:
        record: with ``code``, or of a commit.
        today: hashes of the rooms of this checkout.
        at_commit: returns those of a commit; None where this clone does not have it.
    """
    commit = record["source"]["commit"]
    then: Hashes | None = record.get("code")
    if then is None and commit is None:
        return "its commit was not recorded"
    if then is None:
        then = at_commit(commit)
    if then is None:
        return f"{_UNKNOWN}of commit {commit[:7]}, which this clone does not have"
    changed = [room for room in rooms_of(record) if then.get(room) != today.get(room)]
    at = f" since {commit[:7]}" if commit else ""
    return f"changed{at}: {', '.join(changed)}" if changed else None


def stale(
    results: Mapping[str, Record], today: Hashes, at_commit: Callable[[str], Hashes | None]
) -> Iterator[Stale]:  # fmt: skip
    """Yield the records that are of older code, or of code that is not known; the arguments are those of `reason`."""
    for name, record in results.items():
        why = reason(record, today, at_commit)
        if why is not None:
            yield Stale(name, why, command_of(record))


@cache
def hashes_at(commit: str) -> Hashes | None:
    """Return the hashes of the package's rooms at a commit; None where git or the commit is missing."""
    package = "fastpack_trl"
    command = ["git", "-C", str(Path(__file__).parents[1]), "archive", commit, package]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        found = {
            member.name.removeprefix(f"{package}/"): stream.read()
            for member in files
            if member.name.endswith(".py") and (stream := files.extractfile(member)) is not None
        }
    return hashes_of(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.stale``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stale", description=__doc__)
    parser.parse_args(arguments)
    results = load_results()
    found = list(stale(results, code_hashes(), hashes_at))
    for one in found:
        print(f"{(RESULTS / one.name).relative_to(RESULTS.parents[1])}\n  {one.why}\n  {one.command}")
    print("\n".join(summed_up(found, len(results))))


def summed_up(found: Sequence[Stale], records: int) -> list[str]:
    """Return how many of `records` are of older code, and how many of unknown code, each with the remedy."""
    unknown = sum(one.unknown for one in found)
    older = len(found) - unknown
    lines = [f"{older} of {records} records are of older code{': run these commands again' if older else ''}"]
    if unknown:
        lines.append(f"{unknown} of {records} are of commits that this clone does not have: git fetch --unshallow")
    return lines


if __name__ == "__main__":
    main()
