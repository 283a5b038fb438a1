"""The JSON file of a measurement that a second run of the same measurement goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError
from fastpack_trl.measure.record import finite, write_json

_SAME_RUN = ("schema", "case", "seed", "versions", "source", "machine")
_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The JSON file of a run: written whole after every row, and read by the run that goes on with it.

    Attributes:
        path: the file; its folder exists.
        again: measure every row anew and replace the file, whatever is in it.
    """

    path: Path
    again: bool = False

    def finished(self, head: Mapping[str, Any], apart: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return the rows of the file that measured something, if it was made by the same run.

        Args:
            head: a record without rows, as this run would write it.
            apart: settings that do not decide about what is measured.

        Raises:
            UserError: the file holds something else, or was made with other settings, versions, commit or device.
        """
        if self.again or not self.path.exists():
            return []
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            before = {key: found[key] for key in (*_SAME_RUN, "settings")}
            rows: list[dict[str, Any]] = list(found["rows"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--json {str(self.path)!r} exists and is no record of a benchmark ({type(error).__name__}: {error}): "
                "name another file, or --again to replace it"
            ) from error
        now = {key: finite(head[key]) for key in (*_SAME_RUN, "settings")}
        for side in (before, now):
            side["settings"] = {key: value for key, value in side["settings"].items() if key not in apart}
        other = _difference(before, now)
        if other is not None:
            raise UserError(
                f"--json {str(self.path)!r} holds another run ({other}): name another file, or --again to replace it"
            )
        return [row for row in rows if not row.get("skipped")]

    def whole(self, head: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the record of the file if the same run has finished it; None if there is none, or an unfinished one.

        Args:
            head: as for `finished`.

        Raises:
            UserError: see `finished`.
        """
        if not self.finished(head):
            return None
        record: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return record if record["complete"] else None

    def save(self, record: Mapping[str, Any]) -> None:
        """Write `record`, whole or not at all."""
        write_json(self.path, record)


def _difference(before: Any, now: Any, name: str = "") -> str | None:
    """Return the first value in which two records differ: ``settings.rounds: 6 there, 9 here``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*before, *now)):
            inner = f"{name}.{key}" if name else str(key)
            if key not in before or key not in now:
                return f"{inner}: only {'there' if key in before else 'here'}"
            found = _difference(before[key], now[key], inner)
            if found is not None:
                return found
        return None
    return None if before == now else f"{name}: {str(before)[:_SHOWN]} there, {str(now)[:_SHOWN]} here"
