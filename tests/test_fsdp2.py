"""FSDP 2 as accelerate makes it: whole runs of ours on two ranks log what stock logs; see `support/fsdp2.py`."""

from __future__ import annotations

from pathlib import Path

from ranks import fork_ranks

IMPORTS = "torch.distributed.fsdp,trl:SFTTrainer,peft,fastpack_trl:FastSFTTrainer"


def test_two_ranks_train_as_stock(tmp_path: Path) -> None:
    """Compiled layers, plans, offload, proof, experts, merged micro-batches: see `fsdp2_ranks.py`."""
    fork_ranks(Path(__file__).with_name("fsdp2_ranks.py"), str(tmp_path), imports=IMPORTS, timeout=900)
