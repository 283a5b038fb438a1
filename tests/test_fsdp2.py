"""FSDP 2 as accelerate makes it: whole runs of ours on two ranks log what stock logs; see `support/fsdp2.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import fork_ranks

IMPORTS = "torch.distributed.fsdp,trl:SFTTrainer,peft,fastpack_trl:FastSFTTrainer"


@pytest.mark.parametrize("case", ["compiled", "agreed", "memory", "proof"])
def test_two_ranks(case: str, tmp_path: Path) -> None:
    fork_ranks(Path(__file__).with_name("fsdp2_ranks.py"), str(tmp_path), case, imports=IMPORTS)
