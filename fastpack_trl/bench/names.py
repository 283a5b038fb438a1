"""The names of the sides for people: one per side, in tables, plots and options. Records keep their keys."""

from __future__ import annotations

from collections.abc import Iterable

OURS, PLAN = "fastpack", "fastpack_plan"
_NAMES = {
    "stock": "stock",
    "tuned": "stock compiled",
    "rebuild": "stock, rebuilt in each layer",
    OURS: "fastpack (same memory)",
    PLAN: "fastpack",
}
"""Key in a record -> name. *Same memory*: it recomputes as `gradient_checkpointing` says, as stock does."""
COMPILED_OPTION = "stock_compiled"
"""How ``--baseline`` names the key ``tuned``, which it takes too."""


def side_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name of each side of a row: ``{"tuned": "stock compiled", "fastpack": "fastpack"}``.

    One side of ours is *fastpack*; of two, the one at its defaults is. A key without a name is its own.
    """
    found = list(keys)
    names = {key: _NAMES.get(key, key) for key in found}
    return names if PLAN in found or OURS not in found else names | {OURS: "fastpack"}
