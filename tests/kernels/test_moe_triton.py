"""The Triton kernels of the experts block: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from triton_cases import run_cases

CASES = Path(__file__).with_name("triton_moe_cases.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    run_cases(CASES, interpret=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_equal_their_twins_on_cuda() -> None:
    run_cases(CASES, interpret=False)
