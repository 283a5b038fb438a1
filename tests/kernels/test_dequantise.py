"""4-bit weights made dense: one kernel, its torch twin and bitsandbytes give the same bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from counted_launches import kernels_of
from quantised_material import dequantise_4bit_torch, packed_weight

from fastpack_trl.kernels import dequantise
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


@pytest.mark.parametrize("how", ["raises", "differs", "equals"])
def test_one_kernel_runs_only_where_it_gives_the_bits_of_bitsandbytes(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice that CUDA makes, with the twin in the kernel's place."""
    calls = 0

    def kernel(packed: torch.Tensor, state: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if how == "raises":
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
        dense = dequantise_4bit_torch(packed, state, functional.get_4bit_type(state.quant_type, device="cpu"))
        return dense if how == "equals" else torch.nextafter(dense, torch.tensor(9.0))

    monkeypatch.setattr(dequantise, "_proofs", {})
    monkeypatch.setattr(dequantise, "_by_kernel", kernel)
    monkeypatch.setattr(dequantise, "_covers", lambda packed, state: True)
    packed, state = packed_weight((48, 64), "nf4", nested=True, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, logger=dequantise.logger.name):
        found = [dequantise_4bit(packed, state) for _ in range(3)]
    assert all(torch.equal(dense, functional.dequantize_4bit(packed, state)) for dense in found)
    assert calls == (4 if how == "equals" else 1), "compared once per format"
    said = [record.getMessage() for record in caplog.records]
    if how == "equals":
        assert not said
    else:
        (line,) = said
        assert "by bitsandbytes" in line
        assert ("Failed to find C compiler" if how == "raises" else "differ") in line


@pytest.mark.cuda
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_one_kernel_is_launched_also_in_a_cuda_graph(nested: bool) -> None:
    packed, state = packed_weight((512, 1024), "nf4", nested=nested, device="cuda")
    expected = functional.dequantize_4bit(packed, state)
    assert torch.equal(dequantise_4bit(packed, state), expected)  # compared here, not while it is recorded
    assert dequantise.proven(packed, state)
    assert kernels_of(lambda: dequantise_4bit(packed, state)) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = dequantise_4bit(packed, state)
    packed.bitwise_xor_(torch.full_like(packed, 0x11))
    graph.replay()
    assert torch.equal(dense, functional.dequantize_4bit(packed, state))


@pytest.mark.cuda
def test_a_format_first_met_in_a_cuda_graph_is_left_to_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise, "_proofs", {})
    packed, state = packed_weight((64, 64), "nf4", nested=True, device="cuda")
    functional.dequantize_4bit(packed, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = dequantise_4bit(packed, state)
    graph.replay()
    assert torch.equal(dense, functional.dequantize_4bit(packed, state))
    assert not dequantise._proofs


@pytest.mark.cuda
def test_a_format_is_compared_on_the_stream_on_which_bitsandbytes_quantises(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []
    monkeypatch.setattr(dequantise, "_proofs", {})
    monkeypatch.setattr(dequantise, "_difference", lambda form: streams.append(torch.cuda.current_stream()) or "")
    packed, state = packed_weight((64, 64), "nf4", nested=True, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert dequantise.proven(packed, state)
        assert torch.cuda.current_stream() == side
    assert streams == [torch.cuda.default_stream()]
