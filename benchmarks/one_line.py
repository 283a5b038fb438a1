"""What the commands of this folder share: an error for people in one line, and a record that is read again."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastpack_trl.bench.command import EXIT_INTERRUPTED
from fastpack_trl.bench.report import read_record
from fastpack_trl.cli.main import EXIT_USER_ERROR, _without_kernel_advice
from fastpack_trl.errors import UserError, describe


def in_one_line(name: str, run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; a `UserError` is one line, after its traceback if that is asked for.

    Args:
        name: of the command, for the line.
        run: returns the exit code; None is 0.
    """
    try:
        with _without_kernel_advice():
            return run() or 0
    except UserError as error:
        if os.environ.get("FASTPACK_TRACEBACK"):
            traceback.print_exc()
        print(f"{name}: error: {describe(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def record_of(file: str, case: str) -> dict[str, Any]:
    """Return the record in a file.

    Raises:
        UserError: there is none, or one of another case.
    """
    record = read_record(Path(file))
    if record["case"] != case:
        raise UserError(f"{file!r} is a record of {record['case']}: name one of {case}")
    return record
