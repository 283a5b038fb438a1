"""4-bit weights made dense: one kernel, its torch twin and bitsandbytes give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_operators import kernels_of
from lora_material import dequantize_4bit_torch, packed_weight
from old_device import forced_capability
from torch._subclasses.fake_tensor import FakeTensorMode

from fastpack_trl.kernels.dequantize import _has_kernel, dequantize_4bit

functional = pytest.importorskip("bitsandbytes.functional")
NESTED = pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """What bitsandbytes computes in Python runs as it stands: it is compiled by default, anew for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


# Rows of even length that end within a block: bitsandbytes 0.50 gives them wrong scales on a CPU with AVX-512.
@pytest.mark.parametrize(("shape", "blocksize"), [((1, 2), 32), ((2, 33), 64), ((129, 1037), 64), ((129, 1037), 4096)])
@NESTED
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_twin_equals_bitsandbytes(dtype: torch.dtype, kind: str, nested: bool, blocksize: int, shape: Any) -> None:
    packed, state = packed_weight(shape, kind, nested=nested, blocksize=blocksize, dtype=dtype)
    twin = dequantize_4bit_torch(packed, state, functional.get_4bit_type(kind, device="cpu"))
    assert torch.equal(twin, functional.dequantize_4bit(packed, state).view(shape))


def test_only_formats_that_the_kernel_reads_reach_it() -> None:
    """Tensors without values, as on CUDA; bitsandbytes takes the others."""
    pytest.importorskip("triton")
    flat = {"state2": None, "absmax": (2, torch.float32)}
    for rows, capability, runs, changes in (
        *((64, (8, 0), True, changes) for changes in ({}, flat)),
        *((64, (8, 0), False, {name: value}) for name, value in {"dtype": torch.float64, **flat}.items()),
        *((64, (8, 0), False, {"offset": ((), torch.float16)}), (64, (7, 5), False, {}), (1, (8, 0), False, {})),
    ):
        with FakeTensorMode(), forced_capability(capability):
            inner = SimpleNamespace(absmax=(1, torch.float32), code=(256, torch.float32))
            given = {"absmax": (2, torch.uint8), "offset": ((), torch.float32), "dtype": torch.bfloat16}
            state = SimpleNamespace(**{"state2": inner, **given, **changes})
            for part in (state, inner):
                tensors = {name: value for name, value in vars(part).items() if isinstance(value, tuple)}
                vars(part).update({n: torch.zeros(size, dtype=d, device="cuda") for n, (size, d) in tensors.items()})
            packed = torch.zeros(rows, 64 // rows, dtype=torch.uint8, device="cuda")
            assert _has_kernel(packed, state) == runs, (changes, rows, capability)


@pytest.mark.cuda
@NESTED
def test_one_kernel_is_launched_also_in_a_cuda_graph(nested: bool) -> None:
    packed, state = packed_weight((512, 1024), "nf4", nested=nested, device="cuda")
    assert torch.equal(dequantize_4bit(packed, state), functional.dequantize_4bit(packed, state))
    assert kernels_of(lambda: dequantize_4bit(packed, state)) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = dequantize_4bit(packed, state)
    packed.bitwise_xor_(torch.full_like(packed, 0x11))
    graph.replay()
    assert torch.equal(dense, functional.dequantize_4bit(packed, state))
