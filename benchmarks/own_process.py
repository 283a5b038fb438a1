"""One run of a case in a process of its own: its answer, or in one entry why there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SAID = 2000
"""Characters of the end of what a process that failed has printed."""


def answer_of(
    module: str,
    arguments: Sequence[object],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run ``python -m module arguments --json FILE`` and return what it writes to FILE.

    Args:
        module: e.g. ``benchmarks.captured``.
        arguments: of its command line.
        timeout: seconds after which it is ended.
        environment: variables beside those of this process.
        python: path of the interpreter; another one than this has its own packages, not those of PYTHONPATH.

    Returns:
        The answer; where there is none, or the process was ended, ``failed`` beside what the answer has by then.
    """
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        answer = Path(folder) / "answer.json"
        variables = {**os.environ, **(environment or {})}
        if python != sys.executable:
            variables.pop("PYTHONPATH", None)
        command = [python, "-m", module, *map(str, arguments), "--json", str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables)
            failed = None if answer.exists() else done.stderr.strip()[-_SAID:] or f"exit code {done.returncode}"
        except OSError as error:
            failed = f"{python} does not run: {error}"
        except subprocess.TimeoutExpired:
            failed = f"not done within {timeout:g} s"
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    return found if failed is None else {"failed": failed, **found}
