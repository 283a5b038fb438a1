"""Features with other reasons or contexts, for the time of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fastpack_trl import features
from fastpack_trl.trainers import featured


def with_reasons(patch: pytest.MonkeyPatch, name: str, why_not: Callable[[Any], Any], **more: Any) -> None:
    """Let a feature have the reasons that `why_not` yields, and `more` of its attributes."""
    change = {"why_not": why_not, **more}
    changed = tuple(replace(each, **change) if each.name == name else each for each in features.FEATURES)
    for module in (features, featured):
        patch.setattr(module, "FEATURES", changed)


def without_reasons(patch: pytest.MonkeyPatch, name: str, **more: Any) -> None:
    """Let nothing be against a feature; `more` of its attributes."""
    with_reasons(patch, name, lambda run: iter(()), **more)
