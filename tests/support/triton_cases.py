"""Runs a file of tests of Triton kernels, under the interpreter or on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_cases(cases: Path, *, interpret: bool) -> None:
    """Run the tests of a file in a process of its own, and fail unless some passed and none failed.

    Triton reads the variable when it is imported, and all that it decorates stays so.
    """
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(cases)],
        capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": str(int(interpret))},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout
