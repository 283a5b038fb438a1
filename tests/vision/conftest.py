"""Fixtures of models with a tower."""

from __future__ import annotations

import inspect

import pytest
from transformers.models.qwen3_5 import modeling_qwen3_5


@pytest.fixture
def exact_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen3.5 scan in float64: transformers' scan computes in fp32, which costs 3e-3 of some gradients."""
    source = inspect.getsource(modeling_qwen3_5.torch_chunk_gated_delta_rule).replace("torch.float32", "torch.float64")
    own = dict(vars(modeling_qwen3_5))
    exec(source, own)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", own["torch_chunk_gated_delta_rule"])
