"""4-bit weights made dense: one kernel, its torch twin and bitsandbytes give the same bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from counted_launches import kernels_of
from old_device import forced_capability
from quantised_material import dequantise_4bit_torch, packed_weight
from torch._subclasses.fake_tensor import FakeTensorMode

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


@pytest.mark.parametrize(
    ("changes", "rows", "capability", "runs"),
    [
        ({}, 64, (8, 0), True), ({}, 64, (7, 5), False), ({}, 1, (8, 0), False),
        ({"dtype": torch.float64}, 64, (8, 0), False), ({"state2": None}, 64, (8, 0), False),
        ({"absmax": (2, torch.float32)}, 64, (8, 0), False), ({"offset": ((), torch.float16)}, 64, (8, 0), False),
        ({"state2": None, "absmax": (2, torch.float32)}, 64, (8, 0), True),
    ],
    ids=str,
)  # fmt: skip
def test_only_formats_that_the_kernel_reads_reach_it(
    changes: dict[str, Any], rows: int, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values, as on CUDA; bitsandbytes takes the others."""
    pytest.importorskip("triton")
    kernel = ModuleType("dequantise_triton")
    monkeypatch.setattr(kernel, "dequantise_4bit_triton", lambda *_: "by the kernel", raising=False)
    monkeypatch.setitem(sys.modules, "fastpack_trl.kernels.dequantise_triton", kernel)
    with FakeTensorMode(), forced_capability(capability):
        inner = SimpleNamespace(absmax=(1, torch.float32), code=(256, torch.float32), blocksize=256)
        state = SimpleNamespace(
            absmax=(2, torch.uint8), offset=((), torch.float32), state2=inner, nested=True, dtype=torch.bfloat16,
            quant_type="nf4", blocksize=64, shape=(2, 64),
        )  # fmt: skip
        vars(state).update(changes)
        for part in (state, inner):
            tensors = {name: value for name, value in vars(part).items() if name in ("absmax", "offset", "code")}
            vars(part).update({n: torch.zeros(size, dtype=d, device="cuda") for n, (size, d) in tensors.items()})
        try:
            dense: Any = dequantise_4bit(torch.zeros(rows, 64 // rows, dtype=torch.uint8, device="cuda"), state)
        except Exception as error:  # noqa: BLE001 - whatever bitsandbytes says of a format that is none of its own
            dense = error
    assert isinstance(dense, str) == runs


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
