"""TRL's kernels on tiles of logits beside our torch twin: run by `test_triton.py`, interpreted or on CUDA."""

from __future__ import annotations

import os

import pytest
import torch
from trl.kernels import chunked_logprob

from fastpack_trl.kernels.head_tiles import TorchTiles, TritonTiles

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
KERNELS = {
    "forward": chunked_logprob._forward_kernel, "backward": chunked_logprob._backward_kernel,
    "block_size": chunked_logprob._BLOCK_SIZE,
}  # fmt: skip


@pytest.mark.parametrize("shape", [(1.0, None), (0.25, None), (2.0, 3.0)], ids=["plain", "scaled", "softcapped"])
def test_figures_and_gradients_of_a_tile_equal_the_twins(shape: tuple[float, float | None]) -> None:
    results = []
    for tiles in (TritonTiles(*shape, **KERNELS), TorchTiles(*shape)):
        torch.manual_seed(0)
        tile, targets, factors = torch.randn(7, 1100), torch.randint(1100, (7,)), -torch.rand(7)
        targets[:3] = tile[:3].argmax(-1)
        tile, targets, factors = tile.to(DEVICE), targets.to(DEVICE), factors.to(DEVICE)
        log_probs, entropy = torch.empty(2, 7, device=DEVICE)
        is_top1 = torch.empty(7, dtype=torch.bool, device=DEVICE)
        folded = tiles.fold(tile, targets, log_probs, entropy, is_top1)
        tiles.differentiate(tile, targets, folded, factors)
        assert is_top1.tolist() == [True] * 3 + [False] * 4
        results.append((log_probs, entropy, tile))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
