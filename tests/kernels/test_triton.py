"""Every Triton kernel beside its torch twin: interpreted on the CPU, compiled on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from triton_cases import run_cases

CASES = ("triton_dequantise_cases", "triton_fp8_cases", "triton_head_cases", "triton_moe_cases")
HOW = [
    pytest.param(True, id="interpreted", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")),
    pytest.param(False, id="cuda", marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("cases", CASES)
def test_kernels_equal_their_twins(cases: str, interpret: bool) -> None:
    if "dequantise" in cases:
        pytest.importorskip("bitsandbytes")
    run_cases(Path(__file__).with_name(f"{cases}.py"), interpret=interpret)
