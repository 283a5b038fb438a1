"""Layers that are compiled without a device."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _attention_of_a_graph(varlen_on_the_cpu: None) -> None:
    """Let every test of the folder have attention that a graph can have."""
