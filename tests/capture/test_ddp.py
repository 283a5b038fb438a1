"""Captured micro-steps of two processes under DDP: see `ddp_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import fork_ranks

RANKS = Path(__file__).parent / "ddp_ranks.py"


@pytest.mark.slow
def test_two_ranks_train_captured_as_under_ddp_itself(tmp_path: Path) -> None:
    fork_ranks(RANKS, str(tmp_path), "captured")
