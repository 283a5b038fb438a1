"""FP8 by the reference, on the CPU."""

from __future__ import annotations

import pytest

from fastpack_trl.lora import frozen_base


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")
