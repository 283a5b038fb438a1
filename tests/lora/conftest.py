"""What needs a device, on the CPU."""

from __future__ import annotations

import pytest

from fastpack_trl.lora import report


@pytest.fixture
def copies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the free memory is more than all copies take."""
    monkeypatch.setattr(report, "copy_budget", lambda device: 2**40)
