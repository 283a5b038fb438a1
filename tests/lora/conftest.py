"""What needs a device, on the CPU: FP8 by the reference, and copies of frozen weights."""

from __future__ import annotations

import pytest

from fastpack_trl.features import frozen_base
from fastpack_trl.lora import report


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")


@pytest.fixture
def copies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the free memory is more than all copies take."""
    monkeypatch.setattr(report, "copy_budget", lambda device: 2**40)
