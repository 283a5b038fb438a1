"""Every Triton kernel vs. its torch twin: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = sorted(Path(__file__).parent.glob("*_cases.py"))
HOW = [
    pytest.param(True, id="interpreted", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")),
    pytest.param(False, id="cuda", marks=pytest.mark.cuda),
]


@pytest.mark.slow
@pytest.mark.parametrize("interpret", HOW)
def test_kernels_equal_their_twins(interpret: bool) -> None:
    # In a process of its own: Triton reads the variable when it is imported, and all that it decorates stays so.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-rA", *map(str, CASES)],
        capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": str(int(interpret))},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert {file.name for file in CASES} == set(re.findall(r"^PASSED .*/(\w+\.py)::", run.stdout, re.MULTILINE))
