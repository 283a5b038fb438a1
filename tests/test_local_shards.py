"""What is done over local tensors under FSDP 2, and layers that stay gathered: see `shard_ranks.py`."""

from __future__ import annotations

from pathlib import Path

from ranks import fork_ranks


def test_two_ranks_step_over_local_tensors_as_torch_does_over_dtensors() -> None:
    """Norms, gradients, weights and state are torch's to the last bit; whole weights outlive no step."""
    script = Path(__file__).with_name("shard_ranks.py")
    fork_ranks(script, imports="torch.distributed.fsdp,fastpack_trl:packed_attention", timeout=200)
