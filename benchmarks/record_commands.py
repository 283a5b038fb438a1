"""The command that measured a record, from its settings and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import cuda_tests

Record = Mapping[str, Any]


def command_of(record: Record) -> str:
    """Return the command line that measures a record again, into ``FILE``: the models that it has a figure of."""
    return _COMMANDS[record["case"]](record)


def begun(record: Record) -> list[Mapping[str, Any]]:
    """Return the rows of the models that a record has a figure of, all rows where there is none."""
    models = {row.get("model") for row in record["rows"] if not row.get("skipped")}
    return [row for row in record["rows"] if row.get("model") in models] or list(record["rows"])


def _models_of(record: Record) -> str:
    return " ".join(dict.fromkeys(str(row["model"]) for row in begun(record)))


def _rows_of(record: Record) -> str:
    return " ".join(f'"{name}"' for name in dict.fromkeys(row["row"] for row in record["rows"]))


def _packed_attention(record: Record) -> str:
    settings = record["settings"]
    if "models" not in settings:
        pairs, threads = settings["pairs"], record["machine"]["threads"]
        return f"python -m benchmarks --case packed_attention --quick --pairs {pairs} --threads {threads} --json FILE"
    lengths = " ".join(str(tokens) for tokens in sorted({row["tokens"] for row in record["rows"]}))
    plain = "" if settings["checkpointing"] else " --no-checkpointing"
    return (
        f"python -m benchmarks --case packed_attention --device cuda --model {' '.join(settings['models'])} "
        f"--tokens {lengths}{plain} --json FILE"
    )


def _lora(record: Record) -> str:
    liger = any("seconds" in row["sides"].get("tuned_liger", {}) for row in record["rows"])
    tokens = " ".join(str(row["tokens"]) for row in record["rows"])
    return (
        f"python -m benchmarks --case lora --device {record['machine']['device']} --model {_models_of(record)} "
        f"--tokens {tokens} --pairs {record['settings']['rounds']}{' --liger' if liger else ''} "
        "--json FILE"
    )


def _moe(record: Record) -> str:
    machine = record["machine"]
    threads = "" if machine["device"] == "cuda" else f" --threads {machine['threads']}"
    return (
        f"python -m benchmarks --case moe --device {machine['device']} --model {_models_of(record)} "
        f"--pairs {record['settings']['rounds']}{threads} --json FILE"
    )


def _on_its_device(record: Record) -> str:
    return f"python -m benchmarks --case {record['case']} --device {record['machine']['device']} --json FILE"


def _first_step(record: Record) -> str:
    steps = " ".join(map(str, record["settings"]["steps"]))
    return f"python -m benchmarks.first_step {_rows_of(record)} --steps {steps} --json FILE"


def _memory_caps(record: Record) -> str:
    settings = record["settings"]
    caps = " ".join(f"{cap:g}" for cap in settings["caps_gib"])
    sides = " ".join(dict.fromkeys(side for row in record["rows"] for side in row["sides"]))
    return (
        f"python -m benchmarks.memory_caps {_models_of(record)} --sides {sides} --caps {caps} "
        f"--seconds {settings['seconds']:g} --json FILE"
    )


def _sides_of(record: Record) -> str:
    return " ".join(f'"{side}"' for side in dict.fromkeys(row["side"] for row in record["rows"]))


def _side_by_side(record: Record) -> str:
    rounds = 1 + max(row["round"] for row in record["rows"])
    return (
        f"python -m benchmarks.side_by_side --rows {_rows_of(record)} --sides {_sides_of(record)} --rounds {rounds} "
        "--json FILE"
    )


def _row_profile(record: Record) -> str:
    rows = f"--rows {_rows_of(record)} --sides {_sides_of(record)}{_seconds(record)}"
    return f"python -m benchmarks.row_profile {rows} --json FILE"


def _by_itself(record: Record) -> str:
    return f"python -m benchmarks.by_itself {record['settings']['optimisation']}{_seconds(record)} --json FILE"


def _seconds(record: Record) -> str:
    seconds = record["settings"].get("seconds")
    return "" if seconds in (None, "inf") else f" --seconds {seconds:g}"


_COMMANDS: dict[str, Callable[[Record], str]] = {
    "packed_attention": _packed_attention,
    "attention": lambda record: "python -m benchmarks --case attention --device cuda --json FILE",
    "lora": _lora,
    "moe": _moe,
    "activation_memory": _on_its_device,
    "host_overhead": _on_its_device,
    "collator": lambda record: "python -m benchmarks --case collator --json FILE",
    "by_itself": _by_itself,
    "first_step": _first_step,
    "memory_caps": _memory_caps,
    "equal_memory": lambda record: f"python -m benchmarks.equal_memory {_rows_of(record)} --json FILE",
    "captured": lambda record: f"python -m benchmarks.captured {_rows_of(record)} --json FILE",
    "everyday": lambda record: "python -m benchmarks.everyday --json FILE",
    "balance": lambda record: "python -m benchmarks.balance --json FILE",
    "nf4": lambda record: "python -m benchmarks.nf4 --json FILE",
    "several_gpus": lambda record: "python -m benchmarks.several_gpus --json FILE",
    "fp8_products": lambda record: "python -m benchmarks.fp8_products --json FILE",
    "fp8_steps": lambda record: f"python -m benchmarks.fp8_steps --rows {_rows_of(record)} --json FILE",
    "fp8_accuracy": lambda record: (
        f"python -m benchmarks.fp8_accuracy --pretrain-seconds {record['settings'].get('pretrain_seconds', 60):g} "
        "--json FILE --plot PNG"
    ),
    "side_by_side": _side_by_side,
    "row_profile": _row_profile,
    "cuda_tests": cuda_tests.command,
}
