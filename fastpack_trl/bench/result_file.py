"""The rows of a measurement, one after another, and the JSON file that a second run of the same one goes on with."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fastpack_trl.bench.training_run import TrainingRun
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import date_now, finite, make_record, write_json

_SAME_RUN = ("schema", "case", "seed", "versions", "source", "machine")
_SHOWN = 60  # characters of a value in an error, and of a row's name in the bar


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


@dataclass(frozen=True, slots=True)
class RowTask:
    """A row that is measured in this process: ``RowTask({"setting": "qwen3-8b", "tokens": 8192}, measure)``.

    Attributes:
        label: what the row begins with: a row of the file with the same is the same.
        measure: given seconds that it may take (it may need more), returns the rest of the row.
        empty: keys that a row without a measurement still has.
    """

    label: Mapping[str, Any]
    measure: Callable[[float], dict[str, Any]]
    empty: Mapping[str, Any] = field(default_factory=lambda: {"sides": {}})


Task = RowTask | TrainingRun


def run_rows(
    tasks: Sequence[Task],
    *,
    case: str,
    settings: Mapping[str, Any],
    apart: Mapping[str, Any] | None = None,
    seconds: float = math.inf,
    device: str,
    threads: int,
    seed: int,
    file: ResultFile | None = None,
    alike: bool = False,
    loud: tuple[type[BaseException], ...] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Measure every row that is not finished yet.

    Args:
        tasks: in the order in which they are measured and written.
        case, settings, device, threads, seed: of the record (`make_record`).
        apart: further settings, written too, that do not decide about what is measured: a file whose own differ is
            still gone on with.
        seconds: for all rows, no limit by default; each may use an equal share of what is left, and one that finds no
            time is skipped, named. Rows that were taken over need none.
        file: written after every row. Rows of it that are finished are taken over, also those that are no task now; a
            row that was skipped or failed is measured again.
        alike: rows take about as long as each other: none is begun in less time than the longest so far took.
        loud: errors that end the run instead of being a row's.
        progress: show a bar (on a terminal), and name failures on stderr.

    Returns:
        A record; ``complete`` is False after an interrupt.

    Raises:
        UserError: `file` holds another run.
    """
    apart = apart or {}
    head = make_record(
        case=case, settings={**settings, **apart}, rows=(), complete=False, device=device, threads=threads, seed=seed
    )
    taken = [] if file is None else file.finished(head, tuple(apart))
    if taken and progress and file is not None:
        print(f"{case}: {len(taken)} finished row(s) taken over from {file.path}; --again measures them anew")
    rows: dict[int, dict[str, Any]] = {}
    for index, task in enumerate(tasks):
        mine = next((row for row in taken if _is(row, task)), None)
        if mine is not None:
            rows[index] = mine
            taken.remove(mine)

    def so_far(complete: bool) -> dict[str, Any]:
        done = [*(rows[index] for index in sorted(rows)), *taken]
        return {**head, "complete": complete, "date": date_now(), "rows": done}

    waiting = [index for index in range(len(tasks)) if index not in rows]
    end_at = time.perf_counter() + seconds
    longest = 0.0
    bar = tqdm(total=len(tasks), initial=len(rows), unit="row", disable=None if progress else True, dynamic_ncols=True)
    with bar:
        try:
            for begun, index in enumerate(waiting):
                task = tasks[index]
                bar.set_description(_name(task)[:_SHOWN], refresh=True)
                began = time.perf_counter()
                left = end_at - began
                found: dict[str, Any] | None = None
                if left <= (longest if alike else 0.0):
                    took = f", a row took up to {longest:.0f} s" if alike and longest else ""
                    failure: str | None = f"no time left: {max(0.0, left):.0f} of {seconds:g} s{took}"
                else:
                    found, failure = attempt(partial(task.measure, left / (len(waiting) - begun)), loud)
                    if failure is not None and progress:
                        bar.write(f"{case}: {_name(task)}: {failure}", file=sys.stderr)
                    longest = max(longest, time.perf_counter() - began)
                empty = task.empty if isinstance(task, RowTask) else {}
                rows[index] = {**task.label, **(found or {"skipped": failure, **empty})}
                # The sides hold cycles, and the next row must not run beside their memory. After a fault of the device
                # every call fails; what was measured before it is kept.
                attempt(partial(free_memory, device))
                bar.update()
                if file is not None:
                    file.save(so_far(complete=False))
        except KeyboardInterrupt:
            return so_far(complete=False)
    return so_far(complete=True)


def _name(task: Task) -> str:
    """Return setting and row length, for people."""
    setting = str(task.label.get("setting") or next(iter(task.label.values())))
    tokens = f"{task.label['tokens']:,} tokens" if "tokens" in task.label else setting
    return setting if tokens in setting else f"{setting}, {tokens}"


def _is(row: Mapping[str, Any], task: Task) -> bool:
    return all(row.get(key) == finite(value) for key, value in task.label.items())
