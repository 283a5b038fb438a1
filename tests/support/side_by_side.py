"""Logs of two runs side by side, on whatever processor.

An accuracy says which of several numbers is the largest. If these are equal but for rounding, the processor, its number
of threads and the order of a sum decide; what was computed does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PAIRS = {"rewards/accuracies": "rewards/margins", "accuracy": "margin"}
"""Accuracy of pairs -> its mean margin: 0 but for rounding where policy and reference are equal, as in a first step."""
TOKENS = "mean_token_accuracy"
FEW_TOKENS = 0.05
"""One token of twenty. In fp32 two logits of a log may be a tie, which is one row; in bf16 there are some in each."""

Log = Sequence[Mapping[str, Any]]


def difference(mine: Log, theirs: Log, rtol: float, atol: float, more: Callable[[str], float] = lambda _: 0.0) -> str:
    """Return the first figure that differs; empty where none does.

    Args:
        more: a figure's absolute error beside `atol`, by its name.
    """
    if [row.keys() for row in mine] != [row.keys() for row in theirs]:
        return f"the logs have other keys: {[sorted(row) for row in mine]} and {[sorted(row) for row in theirs]}"
    tied = False
    for row, expected in zip(mine, theirs, strict=True):
        for name, value in expected.items():
            found, kind = row[name], name.removeprefix("eval_")
            if found == value or (found != found and value != value):  # None, infinite; NaN
                continue
            if None not in (found, value) and abs(found - value) <= atol + rtol * abs(value) + more(name):
                continue
            margin = expected.get(name.replace(kind, PAIRS[kind])) if kind in PAIRS else None
            if margin is not None and abs(margin) <= atol + more(PAIRS[kind]):
                continue
            if kind == TOKENS and abs(found - value) <= FEW_TOKENS and (rtol >= 1e-3 or (rtol > 0 and not tied)):
                tied = True
                continue
            return f"{name} of step {expected.get('step')}: {found} and {value}"
    return ""


def assert_equal(
    mine: Log, theirs: Log, rtol: float = 1e-5, atol: float = 2e-6, *more: Callable[[str], float], nan_ok: bool = False
) -> None:
    """Check two logs; see `difference`."""
    assert difference(mine, theirs, rtol, atol, *more) == ""
    assert nan_ok or not any(value != value for row in theirs for value in row.values()), theirs
