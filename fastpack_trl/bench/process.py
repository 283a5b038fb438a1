"""`OwnProcess`: a function that runs in a new interpreter, or in several, and answers with plain data.

This module imports neither torch nor transformers: a function may have to import something before them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, describe
from fastpack_trl.measure.record import write_json

_ENDS_WITHIN = 10.0  # seconds in which processes that are told to end must do so


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """A launcher: a new interpreter per run, or several of them, that call a function.

    ```python
    launch = OwnProcess("benchmarks.mine:measure_side", options={"seed": 0}, timeout=400)
    launch({"tokens": 4096}, "stock")  # calls measure_side({"tokens": 4096}, "stock", seed=0) in its own process
    OwnProcess("benchmarks.mine:measure_side", command=["torchrun", "--nproc_per_node", "2"])  # a process per GPU
    ```

    Attributes:
        function: ``module:name``; called as ``name(row, side, **options)``, it returns plain data for JSON. Of several
            processes rank 0 answers.
        options: further arguments, plain data too.
        timeout: seconds after which the processes are ended.
        command: the words before ``-m`` that start them.
        environment: additional variables.
    """

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    command: Sequence[str] = field(default_factory=lambda: (sys.executable,))
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, row: Mapping[str, Any], side: str) -> dict[str, Any]:
        """Run `function` for a side of a row and return its answer; a `UserError` of the function is raised here.

        If it failed or ended without one: ``failed``, the reason in a line, and ``last_lines`` of its output.
        """
        with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
            task, answer, log = (Path(folder, name) for name in ("task.json", "answer.json", "log"))
            write_json(task, {"function": self.function, "arguments": [row, side], "options": self.options})
            failed = self._wait([*self.command, "-m", __name__, str(task), str(answer)], log)
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        if "error" in result:
            raise UserError(f"{side}: {result['error']}")
        if failed is None and "done" in result:
            return dict(result["done"])
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        return {"failed": result.get("failed") or failed or f"its process ended: {last}", "last_lines": lines[-60:]}

    def _wait(self, command: Sequence[str], log: Path) -> str | None:
        """Run a command with its output in `log`; return why it gave no result, or None if it may have given one."""
        env = {**os.environ, **self.environment}
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)  # noqa: S603
        try:
            process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            return f"not done within {self.timeout:g} s"
        finally:  # also after an interrupt, which reaches this process only
            for request in (signal.SIGTERM, signal.SIGKILL):  # to all that it has started
                if process.poll() is None:
                    os.killpg(process.pid, request)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_ENDS_WITHIN)
        # One process that has answered may still fail at its end; of several another one has failed.
        return f"ended with {process.returncode}" if process.returncode and len(self.command) > 1 else None


def _answer(task_file: str, answer_file: str) -> None:
    """Do what `OwnProcess` asks for, in its process."""
    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    module, _, name = task["function"].partition(":")

    def write(result: Mapping[str, Any]) -> None:
        if os.environ.get("RANK", "0") == "0":
            write_json(Path(answer_file), result)

    try:
        write({"done": getattr(import_module(module), name)(*task["arguments"], **task["options"])})
    except UserError as error:
        write({"error": describe(error)})
    except Exception as error:
        write({"failed": f"{type(error).__name__}: {describe(error)}"})
        raise


if __name__ == "__main__":
    _answer(*sys.argv[1:])
