"""4-bit weights made dense: one kernel, its torch twin and bitsandbytes give the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from counted_launches import kernels_of
from quantised_material import dequantise_4bit_torch, packed_weight

from fastpack_trl.kernels.dequantise import dequantise_4bit

functional = pytest.importorskip("bitsandbytes.functional")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """What bitsandbytes computes in Python runs as it stands: it is compiled by default, anew for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


# Rows of even length that end within a block: bitsandbytes 0.50 gives them wrong scales on a CPU with AVX-512.
@pytest.mark.parametrize("shape", [(1, 2), (2, 33), (129, 1037)])
@pytest.mark.parametrize("blocksize", [32, 64, 4096])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_twin_equals_bitsandbytes(
    dtype: torch.dtype, kind: str, nested: bool, blocksize: int, shape: tuple[int, int]
) -> None:
    packed, state = packed_weight(shape, kind, nested=nested, blocksize=blocksize, dtype=dtype)
    twin = dequantise_4bit_torch(packed, state, functional.get_4bit_type(kind, device="cpu"))
    assert torch.equal(twin, functional.dequantize_4bit(packed, state).view(shape))


@pytest.mark.cuda
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_one_kernel_is_launched_also_in_a_cuda_graph(nested: bool) -> None:
    packed, state = packed_weight((512, 1024), "nf4", nested=nested, device="cuda")
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(dequantise_4bit(packed, state), expected)
    assert kernels_of(lambda: dequantise_4bit(packed, state)) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = dequantise_4bit(packed, state)
    packed.bitwise_xor_(torch.full_like(packed, 0x11))
    graph.replay()
    assert torch.equal(dense, functional.dequantize_4bit(packed, state))
