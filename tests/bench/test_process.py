"""`OwnProcess`: a function in one or several processes, which answers or says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastpack_trl.bench.process import OwnProcess, torchrun
from fastpack_trl.errors import UserError

ROW = {"row": "tiny", "tokens": 24}


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def _process(**changes: Any) -> OwnProcess:
    return OwnProcess("sides_by_name:answering", options={"says": "done"}, **changes)


def test_a_process_of_its_own_answers_or_says_why_not() -> None:
    found = _process()(ROW, "stock")
    assert found == {"said": "done", "tokens_seen": 24, "ranks": "1"}
    failed = _process()(ROW, "breaks")
    assert failed["failed"] == "RuntimeError: no kernel"
    assert any("in answering" in line for line in failed["last_lines"])
    assert _process()(ROW, "dies")["failed"] == "its process ended: killed by hand"
    with pytest.raises(UserError, match=r"^misses: no such model$"):
        _process()(ROW, "misses")
    assert "absent does not run" in _process(command=("/absent",))(ROW, "stock")["failed"]


def test_a_run_that_takes_too_long_is_ended() -> None:
    assert _process(timeout=2.0)(ROW, "hangs")["failed"] == "not done within 2 s"


def test_of_several_processes_the_first_answers() -> None:
    several = _process(command=torchrun(2))
    assert several(ROW, "stock")["ranks"] == "2"
    assert several(ROW, "fails beside")["failed"] == "ended with 1"
