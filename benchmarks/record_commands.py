"""The command that measured a record, from its settings and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import cuda_tests
from benchmarks.training_side import EAGER, OURS

Record = Mapping[str, Any]


def command_of(record: Record) -> str:
    """Return the command line that measures a record again, into ``FILE``: the models that it has a figure of."""
    case = record["case"]
    if case == cuda_tests.CASE:
        return cuda_tests.command(record)
    if case == "captured":  # its records are older than the sides of the other
        return f'python -m benchmarks.side_by_side --rows {_rows(record)} --sides "{OURS}" "{EAGER}" --json FILE'
    options = _OPTIONS.get(case)
    words = (f"python -m benchmarks.{case}", options(record) if options else "", "--json FILE")
    return " ".join(filter(None, (*words, "--plot PNG" * (case == "fp8_accuracy"))))


def begun(record: Record) -> list[Mapping[str, Any]]:
    """Return the rows of the models that a record has a figure of, all rows where there is none."""
    models = {row.get("model") for row in record["rows"] if not row.get("skipped")}
    return [row for row in record["rows"] if row.get("model") in models] or list(record["rows"])


def _listed(values: Iterable[Any]) -> str:
    return " ".join(dict.fromkeys(map(str, values)))


def _models(record: Record) -> str:
    return _listed(row["model"] for row in begun(record))


def _rows(record: Record) -> str:
    return _listed(f'"{row["row"]}"' for row in record["rows"])


def _sides(record: Record) -> str:
    return _listed(f'"{row["side"]}"' for row in record["rows"])


def _settings(record: Record) -> str:
    rows = _listed(f'"{row["setting"]}"' for row in record["rows"])
    return f"--rows {rows} --rounds {record['settings']['rounds']}"


def _moe(record: Record) -> str:
    return f"--rows {_models(record)} --rounds {record['settings']['rounds']}"


def _memory_caps(record: Record) -> str:
    settings = record["settings"]
    caps = " ".join(f"{cap:g}" for cap in settings["caps_gib"])
    sides = _listed(side for row in record["rows"] for side in row.get("sides") or [row["side"]])
    models = _listed(row.get("model") or row["row"] for row in begun(record))
    return f"{models} --sides {sides} --caps {caps} --seconds {settings['seconds']:g}"


def _side_by_side(record: Record) -> str:
    rounds = 1 + max(row["round"] for row in record["rows"])
    return f"--rows {_rows(record)} --sides {_sides(record)} --rounds {rounds}"


def _shared_prefixes(record: Record) -> str:
    settings = record["settings"]
    more = f"--of {settings['model']} --tokens {settings['tokens']}" + " --lora" * settings["lora"]
    sides = _listed(f'"{side}"' for row in record["rows"] for side in row.get("sides", ()))
    return f"--rows {_rows(record)} --sides {sides} {more} --rounds {settings['rounds']}"


def _seconds(record: Record) -> str:
    seconds = record["settings"].get("seconds")
    return "" if seconds in (None, "inf") else f" --seconds {seconds:g}"


_OPTIONS: dict[str, Callable[[Record], str]] = {
    "moe": _moe,
    "hybrid": _settings,
    "several_gpus": lambda record: "--rows " + _listed('"{name}"'.format_map(row) for row in record["rows"]),
    "preference": lambda record: f"--rows {_rows(record)} --rounds {record['settings']['rounds']}",
    "by_itself": lambda record: f"{record['settings']['optimisation']}{_seconds(record)}",
    "first_step": lambda record: f"{_rows(record)} --steps {' '.join(map(str, record['settings']['steps']))}",
    "memory_caps": _memory_caps,
    "equal_memory": _rows,
    "fp8_steps": lambda record: f"--rows {_rows(record)}",
    "fp8_accuracy": lambda record: f"--pretrain-seconds {record['settings'].get('pretrain_seconds', 60):g}",
    "side_by_side": _side_by_side,
    "shared_prefixes": _shared_prefixes,
    "row_profile": lambda record: f"--rows {_rows(record)} --sides {_sides(record)}{_seconds(record)}",
}
"""Options by case, beside the file."""
