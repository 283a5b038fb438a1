"""The device that replays on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from captured_material import capturing


@pytest.fixture
def devices() -> Iterator[SimpleNamespace]:
    """Let runs on the CPU be captured; `capturing`."""
    with capturing() as found:
        yield found
