"""Mixture-of-experts layers under gradient checkpointing are compiled, with plans kept and inputs offloaded or not."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting, attributes, make, one_step, row
from trainer_material import assert_same_log, both

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.checkpointing.offload import checkpointed_layers, offload_checkpoints
from fastpack_trl.checkpointing.streams import HostStreams
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.moe.apply import apply_moe


@pytest.mark.parametrize("checkpoint_offload", [False, True], ids=["", "offload"])
def test_the_trainer_compiles_checkpointed_experts_and_trains_as_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_offload: bool
) -> None:
    graphs = Counting(differentiate=not checkpoint_offload)
    defaults: Any = compiled_layers.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "_backend", graphs)
    fast: dict[str, Any] = {"layer_compile": "on"}
    if checkpoint_offload:
        from fastpack_trl.checkpointing import checkpoint_offload as feature

        monkeypatch.setattr(feature, "offload_unavailable", lambda device: "")
        monkeypatch.setattr(feature, "CudaStreams", HostStreams)
        fast["checkpoint_offload"] = "double_buffer"
    ours, stock = both(
        tmp_path, family="qwen3_moe", packing=True, gradient_checkpointing=True, learning_rate=1e-4, fast=fast
    )
    assert_same_log(ours, stock, rtol=5e-5, atol=1e-5)
    report = ours.fastpack_report
    assert (report["layer_compile"].status, report["layer_compile"].path) == ("on", "compiled"), report.table()
    assert graphs.graphs, "nothing was compiled"
    assert report["moe"].status == "on"
    assert report["checkpoint_offload"].status == ("on" if checkpoint_offload else "off")


@pytest.mark.parametrize(("first", "offload"), [("moe", False), ("compile", True)])
def test_gradients_of_compiled_checkpointed_experts_whichever_wrapper_comes_first(first: str, offload: bool) -> None:
    model = make("qwen3_moe", checkpointing=True)
    data = [row(seed) for seed in range(3)]
    with packed_attention(model):
        expected = [one_step(model, *one) for one in data]
    before = attributes(model)
    backend = Counting(differentiate=True)

    def offloaded() -> Any:
        return offload_checkpoints(checkpointed_layers(model), min_bytes=1, streams=HostStreams)

    with packed_attention(model), contextlib.ExitStack() as stack:
        if first == "moe":
            stack.enter_context(apply_moe(model, check_plans=True))
        layers = stack.enter_context(compiled_layers(model, verbose=False, _backend=backend))
        if first == "compile":
            stack.enter_context(apply_moe(model, check_plans=True))
        if offload:
            used = stack.enter_context(offloaded())
        actual = [one_step(model, *one) for one in data]
        assert layers.path == "compiled", layers.reason
        assert not offload or used.use.most_leased
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    assert attributes(model) == before
    assert backend.graphs == 1  # whatever the rows
