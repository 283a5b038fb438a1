"""A forked process is to its caller what one of its own is; this package is new in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest

SEEN = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), "fastpack_trl" in sys.modules]))
import fastpack_trl
print(fastpack_trl.__file__)
sys.stderr.write("said")
sys.exit(7)
"""


@pytest.mark.slow
def test_arguments_folder_environment_files_and_exit_code_are_those_of_a_process(tmp_path: Path) -> None:
    environment = {**os.environ, "GIVEN": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    both = [
        subprocess.run(
            [python, "-c", SEEN, "a", "b c"],
            input="read",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        for python in (forks.python(), sys.executable)
    ]
    forked, own = [(ran.returncode, ran.stdout, ran.stderr) for ran in both]
    assert forked == own
    assert forked[0] == 7
    assert json.loads(forked[1].splitlines()[0])[-1] is False


@pytest.mark.parametrize(("code", "expected"), [("raise ValueError(3)", 1), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_what_ends_it_ends_the_command(code: str, expected: int) -> None:
    ran = subprocess.run([forks.python(), "-c", code], capture_output=True, text=True)
    assert ran.returncode == expected
    assert ("ValueError: 3" in ran.stderr) == (expected == 1)


def test_a_signal_reaches_it() -> None:
    code = "import time; print('begun', flush=True); time.sleep(100)"
    with subprocess.Popen([forks.python(), "-c", code], stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == "begun\n"
        ran.terminate()
        assert ran.wait(20) == -15
