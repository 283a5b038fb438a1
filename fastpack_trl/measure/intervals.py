"""Quartiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Any


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles as plain data: ``{"median": 2, "q1": 1.5, "q3": 2.5, "values": [1, 2, 3]}``."""
    q1, middle, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": q1, "q3": q3, "values": list(values)}
