"""One JSON file per measurement: its figures with versions, machine, settings and commit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError
from fastpack_trl.measure.code_hash import code_hashes

SCHEMA = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def make_record(
    *,
    case: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    complete: bool,
    device: str = "cpu",
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """Return one run as plain data for JSON. It names neither the host nor any path.

    Args:
        settings: what was asked for, e.g. shapes and number of pairs.
        rows: one entry per measured configuration, every single time included.
        complete: False when the run was interrupted; `rows` is then what was finished.
    """
    return {
        "schema": SCHEMA,
        "case": case,
        "complete": complete,
        "date": date_now(),
        "settings": dict(settings),
        "seed": seed,
        "versions": versions(),
        "source": source(),
        "code": code_hashes(),
        "machine": {**machine(device), "threads": threads},
        "rows": [dict(row) for row in rows],
    }


def date_now() -> str:
    """Return UTC to the second, as a record has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of those that it builds on."""
    from fastpack_trl import __version__

    return {
        "python": platform.python_version(),
        "fastpack_trl": __version__,
        **{package: version_of(package) for package in PACKAGES},
    }


def version_of(package: str) -> str:
    """Return the installed version; torch's names its build (``2.15.0+cu132``), which the package's own does not."""
    import torch

    return str(torch.__version__) if package == "torch" else version(package)


def source() -> dict[str, Any]:
    """Return ``{"commit", "modified"}`` of the checkout that the package runs from; both None where it was installed.

    `modified`: tracked files of the package, or of the benchmarks beside it (not their results), differ from
    the commit; ``changes``, only there where they do, is a hash of how.
    """
    package = Path(__file__).resolve().parents[1]
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    # A package installed inside of somebody's repository is not a checkout of it.
    if top is None or Path(top).resolve() != package.parent:
        return {"commit": None, "modified": None}
    commit = _output("git", "-C", str(package), "rev-parse", "HEAD")
    measured = (package.name, "benchmarks", ":(exclude)benchmarks/results")
    changes = _whole_output("git", "-C", str(package.parent), "diff", "HEAD", "--", *measured)
    if not changes:
        return {"commit": commit, "modified": False}
    return {"commit": commit, "modified": True, "changes": hashlib.sha256(changes.encode()).hexdigest()[:16]}


def machine(device: str) -> dict[str, Any]:
    """Return the system, processor and device, without the host's name."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device,
    }
    if device.startswith("cuda"):
        import torch

        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def _processor() -> str:
    # `platform.processor()` is empty or only the architecture on Linux.
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in {"model name", "Model"}:
                return value.strip()
    return platform.processor() or platform.machine()


def _output(program: str, *arguments: str) -> str | None:
    """Return the first line of what `program` prints; None where it is missing or fails."""
    whole = _whole_output(program, *arguments)
    return None if whole is None else whole.partition("\n")[0].strip()


def _whole_output(program: str, *arguments: str) -> str | None:
    found = shutil.which(program)
    if found is None:
        return None
    command = [found, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - fixed
    return ran.stdout if ran.returncode == 0 else None


def check_writable(path: str | Path, option: str = "--json") -> Path:
    """Return the path once it is known that a file can be written there: a long run must not fail at its end.

    Raises:
        UserError: it is a folder, its folder does not exist, or it may not be written.
    """
    file = Path(path).expanduser()
    folder = file.absolute().parent
    if file.is_dir():
        raise UserError(f"{option} {str(path)!r} is a folder: name a file, e.g. {str(Path(path) / 'result.json')!r}")
    if not folder.is_dir():
        raise UserError(f"{option} {str(path)!r} cannot be written: the folder {str(folder)!r} does not exist")
    if not os.access(folder, os.W_OK) or (file.exists() and not os.access(file, os.W_OK)):
        raise UserError(f"{option} {str(path)!r} cannot be written: no permission")
    return file


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` whole or not at all. What is not finite becomes text (``"nan"``): JSON has no such number."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json_text(record), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def json_text(record: Mapping[str, Any]) -> str:
    """Return the text of a record's file: its rows come last, one a line, facts before raw samples."""
    found = finite(record)
    if not found.get("rows"):
        return json.dumps(found, indent=2, allow_nan=False) + "\n"
    rows = [dict(sorted(row.items(), key=lambda item: isinstance(item[1], dict | list))) for row in found.pop("rows")]
    head = json.dumps(found, indent=1, allow_nan=False).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    return f'{head},\n "rows": [\n{lines}\n ]\n}}\n'


def finite(value: Any) -> Any:
    """Return `value` as JSON stores it: what is not finite as text, tuples as lists, keys as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
