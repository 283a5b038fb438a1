"""One loop over the rows of a case: a budget of time, a file that grows row by row, and a second run that goes on.

A row that fails is named and the next one is measured; an interrupt returns what is finished.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.record import date_now, finite, make_record

_SHOWN = 60  # characters of a row's name in the bar


@dataclass(frozen=True, slots=True)
class RowTask:
    """``RowTask({"setting": "qwen3-8b, 36 of 36 layers", "tokens": 8192}, measure)``.

    Attributes:
        label: what the row is; a row of an earlier run with the same label is the same row.
        measure: given seconds that it may take (it may need more), returns the rest of the row.
        empty: the keys that a row without a measurement still has, e.g. ``{"sides": {}}``.
    """

    label: Mapping[str, Any]
    measure: Callable[[float], dict[str, Any]]
    empty: Mapping[str, Any] = field(default_factory=lambda: {"sides": {}})

    @property
    def name(self) -> str:
        """Return setting and row length, for people."""
        setting, tokens = str(self.label["setting"]), f"{self.label['tokens']:,} tokens"
        return setting if tokens in setting else f"{setting}, {tokens}"


def run_rows(
    tasks: Sequence[RowTask],
    *,
    case: str,
    settings: Mapping[str, Any],
    apart: Mapping[str, Any],
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
                bar.set_description(task.name[:_SHOWN], refresh=True)
                began = time.perf_counter()
                left = end_at - began
                if left <= (longest if alike else 0.0):
                    took = f", a row took up to {longest:.0f} s" if alike and longest else ""
                    found, failure = _nothing(f"no time left: {max(0.0, left):.0f} of {seconds:g} s{took}")
                else:
                    found, failure = attempt(partial(task.measure, left / (len(waiting) - begun)), loud)
                    if failure is not None and progress:
                        bar.write(f"{case}: {task.name}: {failure}", file=sys.stderr)
                    longest = max(longest, time.perf_counter() - began)
                rows[index] = {**task.label, **(found or {"skipped": failure, **task.empty})}
                # The sides hold cycles, and the next row must not run beside their memory. After a fault of the device
                # every call fails; what was measured before it is kept.
                attempt(partial(free_memory, device))
                bar.update()
                if file is not None:
                    file.save(so_far(complete=False))
        except KeyboardInterrupt:
            return so_far(complete=False)
    return so_far(complete=True)


def _nothing(reason: str) -> tuple[dict[str, Any] | None, str | None]:
    return None, reason


def _is(row: Mapping[str, Any], task: RowTask) -> bool:
    return all(row.get(key) == finite(value) for key, value in task.label.items())
