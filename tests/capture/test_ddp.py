"""Captured micro-steps of two processes under DDP: see `ddp_ranks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import fork_ranks, free_port

RANKS = Path(__file__).parent / "ddp_ranks.py"
GPUS = os.environ.get("FASTPACK_TEST_GPUS", "")
"""Where there are several; a test process sees one of them (conftest.py)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["captured", "one fails", "one lacks memory,one changes", "buffers,refused", "uneven"],
)  # fmt: skip
def test_two_ranks_train_captured_as_under_ddp_itself_and_none_waits_for_ever(cases: str, tmp_path: Path) -> None:
    fork_ranks(RANKS, str(tmp_path), cases)


@pytest.mark.cuda
@pytest.mark.skipif(not GPUS, reason="needs two CUDA devices")
def test_two_devices_train_captured_as_eager(tmp_path: Path) -> None:
    path = os.pathsep.join([str(RANKS.parents[2]), str(RANKS.parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port())
    ran = subprocess.run(
        [sys.executable, *launch, str(RANKS), str(tmp_path), "on devices"],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": GPUS},
        timeout=400, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
