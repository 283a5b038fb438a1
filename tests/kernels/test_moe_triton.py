"""The Triton kernels of the experts block: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_moe_cases.py")


def _run_cases(**environment: str) -> None:
    # In a process of its own: Triton reads the variable when it is imported, and all that it decorates stays so.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(CASES)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    _run_cases(TRITON_INTERPRET="1")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_equal_their_twins_on_cuda() -> None:
    _run_cases(TRITON_INTERPRET="0")
