"""One feature is one context manager that installs something and restores it, and a line in the report."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

logger = logging.getLogger(__name__)

Status = Literal["on", "off", "stock"]


@dataclass(frozen=True, slots=True)
class FeatureLine:
    """One row of the banner: ``packed_attention  on  per_document  cpu; window 128, sinks``."""

    feature: str
    status: Status
    """``on``: ours; ``off``: switched off or not applicable; ``stock``: it could not be used, stock's path runs."""
    path: str
    """The chosen implementation, e.g. ``per_document``."""
    reason: str
    """The reason for this path, or against it; names the value that decided."""

    def __str__(self) -> str:
        return f"{self.feature}: {self.path} ({self.reason})" if self.reason else f"{self.feature}: {self.path}"


@dataclass(slots=True)
class FeatureReport:
    """The chosen paths, with reasons. Banner, ``trainer.fastpack_report`` and the command line print this object."""

    lines: list[FeatureLine] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures beside the lines: packing fill, documents, truncated tokens."""

    def add(self, feature: str, status: Status, path: str, reason: str = "") -> FeatureLine:
        """Set the line of `feature`; a later line replaces an earlier one."""
        line = FeatureLine(feature, status, path, reason)
        self.lines = [other for other in self.lines if other.feature != feature] + [line]
        return line

    def remark(self, feature: str, text: str) -> None:
        """Add `text` to the reason of a feature, and say it in the log, the first time that it is heard in a run."""
        line = self[feature]
        if text not in line.reason:
            logger.warning(f"{feature}: {text}")
            reason = "; ".join(filter(None, [line.reason, text]))
            self.lines = [replace(other, reason=reason) if other is line else other for other in self.lines]

    def __getitem__(self, feature: str) -> FeatureLine:
        for line in self.lines:
            if line.feature == feature:
                return line
        known = ", ".join(line.feature for line in self.lines)
        raise KeyError(f"the report has no feature {feature!r}; it has: {known}")

    def __contains__(self, feature: object) -> bool:
        return any(line.feature == feature for line in self.lines)

    def __iter__(self) -> Iterator[FeatureLine]:
        return iter(self.lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: ``{"features": {name: {"status", "path", "reason"}}, "facts": {...}}``."""
        features = {line.feature: asdict(line) for line in self.lines}
        for row in features.values():
            row.pop("feature")
        return {"features": features, "facts": dict(self.facts)}

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the banner: one row per feature, then the figures."""
        rows = [(line.feature, line.status, line.path, line.reason) for line in self.lines]
        head = ("feature", "state", "path", "why")
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(3)]

        def text(row: tuple[str, str, str, str]) -> str:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            return "  ".join([*cells, row[3]]).rstrip()

        out = ["fastpack-trl", text(head), *map(text, rows)]
        out += [f"{name}: {value}" for name, value in self.facts.items()]
        return "\n".join(out)


def disabled_by_environment() -> bool:
    """Return whether ``FASTPACK_DISABLE=1`` turns everything off: the stock trainer runs."""
    return os.environ.get("FASTPACK_DISABLE", "").lower() in {"1", "true", "yes", "on"}
