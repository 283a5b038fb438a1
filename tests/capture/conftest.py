"""The device that replays on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replayed_graphs import TapeDevice

from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.capture import feature


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let runs on the CPU be captured, with attention's twin; return their devices, and let a test set up the next."""
    made: list[TapeDevice] = []
    pending: dict[str, Any] = {}

    def make(_device: torch.device) -> TapeDevice:
        made.append(TapeDevice(**pending))
        return made[-1]

    monkeypatch.setattr(Varlen, "refuses", lambda self, features: "")
    monkeypatch.setattr(feature, "unavailable", lambda device: "")
    monkeypatch.setattr(feature, "CudaGraphs", make)
    return SimpleNamespace(made=made, options=pending)
