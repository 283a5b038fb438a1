"""Fused layers beside projections in 4 bits, checkpoints of others, and weights that come to the device later."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lora_material import quantized
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fastpack_trl.layers import forms
from fastpack_trl.layers.find import kinds_of
from fastpack_trl.layers.replace import fused_layers
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

EXACT: dict[str, Any] = {"dtype": torch.float32, "autocast": False}


def step(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids.to(model.device), labels=ids.to(model.device), use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16])
def test_projections_in_4_bits_run_once(others: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes returns the dtype of its input, that of the norms: TRL loads them in fp32 by default."""
    functional = pytest.importorskip("bitsandbytes.functional")
    counts = Counter[str]()

    def counted(home: Any, name: str) -> None:
        own = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **k: (counts.update([name]), own(*a, **k))[1])

    counted(functional, "dequantize_4bit")
    counted(forms, "gated")
    model, found = quantized("nf4", dtype=others, compute=torch.bfloat16).to(device), []
    with torch.autocast(device, torch.bfloat16):
        for context in (nullcontext(), fused_layers(model, dtype=torch.bfloat16, autocast=True)):
            with context:
                counts.clear()
                found.append((step(model), counts["dequantize_4bit"], counts["gated"]))
    (expected, whole, _), (results, reads, gates) = found
    assert reads == whole > 0
    assert gates == model.config.num_hidden_layers
    assert_gradients_close(results, expected, rtol=3e-2, atol_of_all=1e-3)


def test_projections_in_another_dtype_are_named_and_run_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    called = Counter[str]()
    expected = step(model)

    class Wide(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            called["gate"] += 1
            return super().forward(x).double()

    with fused_layers(model, **EXACT):
        for layer in model.model.layers:
            layer.mlp.gate_proj.__class__ = Wide
            layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        for _ in range(2):
            assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)
    assert called["gate"] == 2 * len(model.model.layers) + 1, "twice in the first call"
    assert "LlamaMLP: its projections return torch.float64 for torch.float32" in caplog.text


class RecomputesAttention(LlamaDecoderLayer):
    """A layer of others, whose attention is a checkpoint of its own."""

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        attend = partial(self.self_attn, **keywords)
        x = self.input_layernorm(hidden_states)
        x = hidden_states + checkpoint(lambda x: attend(hidden_states=x)[0], x, use_reentrant=self.reentrant)
        return x + self.mlp(self.post_attention_layernorm(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_output_without_its_gradient_is_not_added(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecomputesAttention, "reentrant", reentrant, raising=False)
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.__class__ = RecomputesAttention
    expected = step(model)
    raises = pytest.raises(RuntimeError, match="set fused_layers='off'") if reentrant else nullcontext()
    with fused_layers(model, **EXACT), raises:
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)


def test_layers_that_are_fused_already_are_as_few_kinds() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    few = len(kinds_of(model)[0])
    with fused_layers(model, **EXACT):
        assert len(kinds_of(model)[0]) == few


@pytest.mark.cuda
def test_weights_that_come_to_the_device_later_are_proven_there() -> None:
    """Under FSDP 2 and DeepSpeed a model is on the CPU when its layers are fused."""
    model, later = tiny_model("llama"), torch.device("cuda")
    with fused_layers(model, dtype=torch.bfloat16, autocast=True, device=later) as report:
        assert str(report) == "norm 5 of 5, rotary 2 of 2, gate 2 of 2"
        model.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            results = step(model)
    with torch.autocast("cuda", torch.bfloat16):
        assert_gradients_close(results, step(model), rtol=5e-2, atol_of_all=1e-2)
