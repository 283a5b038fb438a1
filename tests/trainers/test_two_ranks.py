"""Two ranks on the CPU: every trainer under DDP, and under FSDP 2, logs and learns what stock does."""

from __future__ import annotations

from pathlib import Path

import pytest
from preference_material import NAMES
from ranks import fork_ranks

pytestmark = pytest.mark.slow

RANKS = Path(__file__).parent / "preference_ranks.py"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "RLOO"])  # which shares all with GRPO
def test_two_ranks_under_ddp_log_and_learn_what_stock_does(name: str, tmp_path: Path) -> None:
    """Adapters, all weights, accumulation: see `preference_ranks.py`."""
    fork_ranks(RANKS, str(tmp_path), name)


def test_two_ranks_compute_the_reference_before(tmp_path: Path) -> None:
    fork_ranks(RANKS, str(tmp_path), "precomputed")


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_two_ranks_under_fsdp2_log_what_stock_logs(name: str, tmp_path: Path) -> None:
    fork_ranks(RANKS, str(tmp_path), "fsdp2", name)
