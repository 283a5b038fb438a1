"""Versions, machine and commit for the record of a measurement, and its file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, is_secret

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


def date_now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its dependencies, torch's with its build."""
    import torch

    from fastpack_trl import __version__

    found = {"python": platform.python_version(), "fastpack_trl": __version__}
    return found | {package: version(package) for package in PACKAGES} | {"torch": str(torch.__version__)}


def source() -> dict[str, Any]:
    """Return ``{"commit", "modified"}`` of the checkout that the package runs from; both None if it was installed.

    `modified`: tracked files of the package, or of the benchmarks in the checkout (not their results), differ from
    the commit; ``changes``, a hash of the difference, is only there if they do.
    """
    package = Path(__file__).resolve().parents[1]
    git = ("git", "-C", str(package.parent))
    top = _output(*git, "rev-parse", "--show-toplevel").strip()
    # A package installed inside another repository is not a checkout of it.
    if not top or Path(top).resolve() != package.parent:
        return {"commit": None, "modified": None}
    commit = _output(*git, "rev-parse", "HEAD").strip() or None
    changes = _output(*git, "diff", "HEAD", "--", package.name, "benchmarks", ":(exclude)benchmarks/results")
    digest = {"changes": hashlib.sha256(changes.encode()).hexdigest()[:16]} if changes else {}
    return {"commit": commit, "modified": bool(changes), **digest}


def machine(device: str) -> dict[str, Any]:
    """Return the system, processor and device, without the host's name."""
    facts: dict[str, Any] = {"system": platform.system(), "architecture": platform.machine(), "processor": _processor()}
    facts |= {"cores": os.cpu_count(), "device": device}
    if device.startswith("cuda"):
        import torch

        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": driver or None}
    return facts


def _processor() -> str:
    # `platform.processor()` is empty or only the architecture on Linux.
    listing = Path("/proc/cpuinfo")
    text = listing.read_text(encoding="utf-8", errors="replace") if listing.is_file() else ""
    name = re.search(r"^(?:model name|Model)\s*:(.*)", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    ran = subprocess.run([program, *command[1:]], capture_output=True, text=True, errors="replace", check=False)  # noqa: S603 - fixed
    return ran.stdout if ran.returncode == 0 else ""


def check_writable(path: str | Path, option: str = "--json") -> Path:
    """Return the path if a file can be written there, else raise `UserError`: a long run must not fail at its end."""
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
    """Write `record` whole or not at all. NaN and infinity become text (``"nan"``): JSON has no such numbers."""
    write_whole(path, json.dumps(finite(record), indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` whole or not at all, to a new file that then takes the place of `path`.

    Its name is random and it is opened with ``O_EXCL``: nobody can plant a link there that would be written through.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def finite(value: Any, bare: bool = False) -> Any:
    """Return `value` as JSON stores it, without secrets: NaN and infinity as text, tuples as lists, keys as text.

    `bare`: of a path, as of any text with slashes, only the last part.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, bare) for key, item in value.items() if not is_secret(key)}
    if isinstance(value, list | tuple):
        return [finite(item, bare) for item in value]
    return value.rstrip("/").rpartition("/")[2] if bare and isinstance(value, str) else value
