"""One feature is one context manager that installs something and restores it, and a line in the report."""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastpack_trl._version import __version__

logger = logging.getLogger(__name__)

Status = Literal["on", "off", "stock"]
WIDTH = 80
"""Columns of the banner."""
_ORDER: tuple[Status, ...] = ("on", "stock", "off")
_STATUS = 7  # columns of the state
_VERBOSE = "FASTPACK_VERBOSE"  # 1: banners give the reasons of features that are off


@dataclass(frozen=True, slots=True)
class FeatureLine:
    """One row of the banner: ``on  packed_attention  per_document: cpu; window 128, sinks``."""

    feature: str
    status: Status
    """``on``: ours; ``off``: disabled or not applicable; ``stock``: unavailable, so TRL's implementation is used."""
    path: str
    """The chosen implementation, e.g. ``per_document``."""
    reason: str
    """The reason for or against this path, with the deciding value."""

    def __str__(self) -> str:
        return f"{self.feature}: {self.path} ({self.reason})" if self.reason else f"{self.feature}: {self.path}"


@dataclass(slots=True)
class FeatureReport:
    """The chosen paths with reasons, printed by the banner, ``trainer.fastpack_report`` and the command line."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Further figures: packing fill, documents, truncated tokens."""
    partly: set[str] = field(default_factory=set)
    """Features that handed some of their work to TRL or PEFT after the start."""
    _lines: dict[str, FeatureLine] = field(default_factory=dict)

    def add(self, feature: str, status: Status, path: str, reason: str = "") -> FeatureLine:
        """Set the line of `feature`, which replaces an earlier one and moves to the end."""
        self._lines.pop(feature, None)
        return self._lines.setdefault(feature, FeatureLine(feature, status, path, reason))

    def remark(self, feature: str, text: str) -> None:
        """Append `text` to the reason of a feature, and log it, once per run."""
        line = self[feature]
        self.partly.add(feature)
        if text not in line.reason:
            logger.warning(f"{feature}: {text}")
            self._lines[feature] = replace(line, reason="; ".join(filter(None, [line.reason, text])))

    def __getitem__(self, feature: str) -> FeatureLine:
        if feature not in self._lines:
            raise KeyError(f"the report has no feature {feature!r}; it has: {', '.join(self._lines)}")
        return self._lines[feature]

    def __contains__(self, feature: object) -> bool:
        return feature in self._lines

    def __iter__(self) -> Iterator[FeatureLine]:
        return iter(self._lines.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: ``{"features": {name: {"status", "path", "reason"}}, "facts": {...}}``."""
        features = {line.feature: {"status": line.status, "path": line.path, "reason": line.reason} for line in self}
        return {"features": features, "facts": dict(self.facts)}

    def table(self) -> str:
        """Return every feature with its reason, then the figures, in lines of at most `WIDTH` characters."""
        return self._page(list(self))

    __str__ = table

    def banner(self) -> str:
        """Return the banner of a run: as `table`, but with all disabled features named in one line."""
        shown = [line for line in self if line.status != "off"]
        off = [line.feature for line in self if line.status == "off"]
        return self.table() if not shown or _is_set(_VERBOSE) else self._page(shown, off)

    def _page(self, lines: list[FeatureLine], off: Sequence[str] = ()) -> str:
        """Return the lines, the names of features that are off, and the facts, wrapped under the end of their heads."""
        width = max((len(line.feature) for line in lines), default=0)
        rows = []
        for line in sorted(lines, key=lambda line: _ORDER.index(line.status)):
            text = f"{line.path}: {line.reason}" if line.reason else line.path
            rows.append((f"{line.status.ljust(_STATUS)}{line.feature.ljust(width)}  ", text))
        if off:
            rows.append(("off".ljust(_STATUS), f"{', '.join(off)} (why: --verbose or {_VERBOSE}=1)"))
        rows += [(f"{name}: ", str(value)) for name, value in self.facts.items()]
        out = [f"fastpack-trl {__version__}"]
        for head, text in rows:
            indent = len(head) if len(head) < WIDTH // 2 else _STATUS
            out += textwrap.wrap(head + text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
        return "\n".join(out)


def enable_verbose() -> None:
    """Let banners of this process and its children show every feature, as ``--verbose`` does."""
    os.environ[_VERBOSE] = "1"


def disabled_by_environment() -> bool:
    """Return whether ``FASTPACK_DISABLE=1`` disables all features, so that TRL's trainer runs."""
    return _is_set("FASTPACK_DISABLE")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}
