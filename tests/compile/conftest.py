"""Attention that a graph can have, without a device."""

from __future__ import annotations

import pytest

from fastpack_trl.attention.varlen import Varlen


@pytest.fixture(autouse=True)
def varlen_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `varlen` be chosen on the CPU, where its operator runs the twin in plain torch."""
    refuses = Varlen.refuses
    monkeypatch.setattr(Varlen, "refuses", lambda self, one: "" if one.device_type == "cpu" else refuses(self, one))
