"""Features with other reasons, for the time of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fastpack_trl import features
from fastpack_trl.trainers import featured


def with_reasons(patch: pytest.MonkeyPatch, name: str, why_not: Callable[[Any], Any]) -> None:
    """Let a feature have the reasons that `why_not` yields."""
    changed = tuple(replace(each, why_not=why_not) if each.name == name else each for each in features.FEATURES)
    for module in (features, featured):
        patch.setattr(module, "FEATURES", changed)


def without_reasons(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let nothing be against a feature."""
    with_reasons(patch, name, lambda run: iter(()))
