"""Each published optimisation by itself, on against off, with the same trainer, model, kernels and rows on both sides.

    python -m benchmarks.by_itself metadata --json FILE

``metadata``: packing metadata and mask once per batch, not in each layer. ``reload``: layer inputs fetched back from
host memory while a layer runs, not before it. ``routing``: tokens of experts found by one sort, not expert by expert.
Beside what was saved stands what `benchmarks.arithmetic` predicts from one such piece timed by itself, and what others
have published. A file of ``--json`` grows row by row, and the same command goes on with it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import by_itself_metadata, by_itself_reload, by_itself_routing
from benchmarks.arithmetic import SOUND, apart
from benchmarks.command import CaseCommand, known
from benchmarks.readme_cells import SURE, grid
from benchmarks.training_side import device_here
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.bench.views import device_of

GUIDE = "https://unsloth.ai/blog/nvidia-collab"
"""Unsloth and NVIDIA, guide of May 2026; each optimisation measured against Unsloth's own earlier code."""


ROWS = {
    "qwen3-14b-qlora": "Qwen3-14B, QLoRA",
    "llama-3.2-1b": "Llama-3.2-1B, whole training step",
    "qwen3-0.6b": "Qwen3-0.6B, whole training step",
    "qwen3-8b-reload": "Qwen3-8B, checkpoints reloaded from host memory",
    "qwen3-14b-reload": "Qwen3-14B, checkpoints reloaded from host memory",
    "qwen3-32b-reload": "Qwen3-32B, checkpoints reloaded from host memory",
    "gpt-oss-20b-routing": "gpt-oss-20b, decoder layers",
}
"""For people, by the row of `benchmarks.by_itself`."""


@dataclass(frozen=True, slots=True)
class Published:
    """``Published("forward +43.3 %, ...", "Qwen3-14B QLoRA; GPU, batch and length not stated")``."""

    quoted: str
    setting: str


PUBLISHED = {
    "qwen3-14b-qlora": Published(
        "forward +43.3 %, backward +5.8 %, per batch +14.3 %", "Qwen3-14B QLoRA; GPU, batch and length not stated"
    ),
    "llama-3.2-1b": Published("199 ms per step saved, 11.5 %", "Llama-3.2-1B, 2,048 packed tokens, Blackwell"),
    "qwen3-0.6b": Published("319 ms per step saved, 14.8 %", "Qwen3-0.6B, 2,048 packed tokens, Blackwell"),
    "qwen3-8b-reload": Published("0.3739 to 0.4053 steps/s, +8.40 %, 0.37 GB more", "8B, whole model, B200"),
    "qwen3-14b-reload": Published("0.2245 to 0.2395 steps/s, +6.70 %, 0.47 GB more", "14B, whole model, B200"),
    "qwen3-32b-reload": Published("0.1979 to 0.2070 steps/s, +4.61 %, 0.23 GB more", "32B, whole model, B200"),
    "gpt-oss-20b-routing": Published(
        "forward +23 %, backward +13 %", "gpt-oss-20b over a loop over experts; GPU, batch and length not stated"
    ),
}
"""By the row of `benchmarks.by_itself`."""

SENTENCES = {
    "metadata": "Packing metadata and mask made in each layer, or once per batch; all else is stock's (sdpa).",
    "reload": "Layer inputs fetched back from host memory one by one, or each while the layer after it runs.",
    "routing": "Tokens of each expert found expert by expert, or by one sort; the products are the same.",
}


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row, the sides that differ in the optimisation alone, and the others below."""
    name = record["settings"]["optimisation"]
    head = (
        f"**{SENTENCES[name]}** {device_of(record)}; forward, backward and step: by how much it is faster, with the "
        "interval of the step. *predicted*: from one such piece timed by itself (`benchmarks/arithmetic.py`)."
    )
    columns = "row, tokens | >off, ms | >on, ms | >forward | >backward | >step | >saved, ms | >predicted, ms"
    rows: list[list[str]] = []
    notes: list[str] = []
    for row in record["rows"]:
        title = f"{row['row']}, {row['tokens']:,}{' (tiny)' if row['tiny'] else ''}"
        if "gains" in row:
            rows.append([title, *_cells(row)])
            notes += _notes(row, title)
        else:
            why = row.get("skipped") or next(side["failed"] for side in row["sides"].values() if "failed" in side)
            rows.append([title, str(why).splitlines()[-1], *[""] * 8])
    lines = [head, "", grid(f"{columns} | >more memory | published by others", rows)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cells(row: Mapping[str, Any]) -> list[str]:
    gains = row["gains"]
    predicted = row["predicted"]["forward"] + row["predicted"]["backward"]
    published = {} if row["tiny"] else PUBLISHED
    quoted = next((one.quoted for name, one in published.items() if row["row"].startswith(name)), "-")
    return [
        *(_ms(row["sides"][row[side]]["seconds"]["median"]) for side in ("off", "on")),
        _gain(gains["forward"]["median"]), _gain(gains["backward"]["median"]),
        step_gain(row),
        _ms(row["saved_seconds"]), _ms(predicted),
        "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**30:+.2f} GiB", quoted,
    ]  # fmt: skip


def step_gain(row: Mapping[str, Any]) -> str:
    """Return by how much a step is faster, with its interval: ``+3.0% (+2.7% to +3.3%)``."""
    step = row["gains"]["seconds"]
    sure = "" if step["coverage"] >= SURE else f", covers {step['coverage']:.0%}"
    return f"{_gain(step['median'])} ({_gain(step['low'])} to {_gain(step['high'])}{sure})"


def _notes(row: Mapping[str, Any], title: str) -> list[str]:
    notes = []
    predicted = row["predicted"]["forward"] + row["predicted"]["backward"]
    if not row["sound"]:
        off = apart(predicted, row["saved_seconds"])
        notes.append(f"- {title}: the prediction is off by {off:.0%}, over {SOUND:.0%}.")
    for name, side in row["sides"].items():
        if "failed" in side:
            notes.append(f"- {title}: *{name}* did not run: {str(side['failed']).splitlines()[-1]}")
        elif name not in (row["off"], row["on"]):
            taken, off = side["seconds"]["median"], row["sides"][row["off"]]["seconds"]["median"]
            notes.append(f"- {title}: *{name}* takes {_ms(taken)} ms, {off / taken:.2f} times as fast as *off*.")
    return notes


def _gain(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"


@dataclass(frozen=True, slots=True)
class Optimisation:
    """Rows in public shapes, the same with tiny models for a CPU, and what measures one of them."""

    rows: Mapping[str, Any]
    tiny: Mapping[str, Any]
    measure: Callable[[Any, int, str, int, float], dict[str, Any]]


OPTIMISATIONS = {
    "metadata": Optimisation(by_itself_metadata.ROWS, by_itself_metadata.TINY, by_itself_metadata.measure_row),
    "reload": Optimisation(by_itself_reload.ROWS, by_itself_reload.TINY, by_itself_reload.measure_row),
    "routing": Optimisation(by_itself_routing.ROWS, by_itself_routing.TINY, by_itself_routing.measure_row),
}


def asked(args: Namespace) -> tuple[str, list[str]]:
    """Return the optimisation, the first name of the command line, and its rows that are asked for.

    Raises:
        UserError: an unknown optimisation or row.
    """
    (name, *rows), names = args.rows or [""], list(OPTIMISATIONS)
    every = OPTIMISATIONS[known("optimisation", [name], names)[0]].rows
    return name, known("row", rows, every) or list(every)


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows of one optimisation, each measured with all of its sides in this process, in turn."""
    name, rows = asked(args)
    which = OPTIMISATIONS[name]
    found = which.tiny if args.tiny else which.rows

    def measure(row: str, seconds: float) -> dict[str, Any]:
        with quiet():
            return which.measure(found[row], args.rounds, device_here(), args.seed, seconds)

    return [
        RowTask({"setting": row, "row": row, "tokens": tokens_of(found[row]), "tiny": args.tiny}, partial(measure, row))
        for row in rows
    ]


def settings(args: Namespace) -> dict[str, Any]:
    """Return what is switched on and off, and how often."""
    return {"optimisation": asked(args)[0], "rounds": args.rounds, "tiny": args.tiny}


def tokens_of(row: Any) -> int:
    """Return the tokens of a packed row; those of a reload are the last of a tuple."""
    return int(row[2] if isinstance(row, tuple) else row.tokens)


COMMAND = CaseCommand(
    case="by_itself", help=__doc__, rows=(), default_rows=(), rounds=7, seconds=190.0, tasks=tasks,
    settings=settings, table=table,
    more=lambda parser: parser.add_argument("--tiny", action="store_true", help="tiny models: it shows that rows run"),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
