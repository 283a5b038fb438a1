"""Every Triton kernel beside its torch twin: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = ("triton_dequantise_cases", "triton_fp8_cases", "triton_head_cases", "triton_moe_cases")
HOW = [
    pytest.param(True, id="interpreted", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")),
    pytest.param(False, id="cuda", marks=pytest.mark.cuda),
]


@pytest.mark.slow
@pytest.mark.parametrize("interpret", HOW)
def test_kernels_equal_their_twins(interpret: bool) -> None:
    here = [cases for cases in CASES if "dequantise" not in cases or find_spec("bitsandbytes") is not None]
    files = [str(Path(__file__).with_name(f"{cases}.py")) for cases in here]
    # In a process of its own: Triton reads the variable when it is imported, and all that it decorates stays so.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-rA", *files], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": str(int(interpret))},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert [cases for cases in here if not re.search(rf"^PASSED .*{cases}", run.stdout, re.MULTILINE)] == []
