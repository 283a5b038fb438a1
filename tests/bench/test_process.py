"""`OwnProcess`: a function in one or several processes, which answers or says why not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import forks
import pytest

from fastpack_trl.bench.process import OwnProcess
from fastpack_trl.errors import UserError


def answering(row: dict[str, Any], side: str, *, says: str) -> Any:
    """Called in the process of a run, by name."""
    match side:
        case "breaks":
            raise RuntimeError("no kernel")
        case "misses":
            raise UserError("no such model")
        case "dies":
            print("killed by hand")
            sys.exit(3)
        case "another rank fails" if os.environ["RANK"] == "1":
            sys.exit(4)
        case "hangs":
            time.sleep(60)
    return {"said": says, "tokens": row["tokens"], "ranks": os.environ.get("WORLD_SIZE", "1")}


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    """The functions of this file, in forked processes."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(forks.__file__).parent}", prepend=":")


def _run(side: str, **changes: Any) -> dict[str, Any]:
    return OwnProcess("test_process:answering", options={"says": "done"}, **changes)({"tokens": 24}, side)


def test_a_process_of_its_own_answers_or_says_why_not() -> None:
    alone = _run("stock", command=[f"{sys.prefix}/bin/python"])  # a new interpreter, as users have
    assert alone == _run("stock") == {"said": "done", "tokens": 24, "ranks": "1"}
    failed = _run("breaks")
    assert failed["failed"] == "RuntimeError: no kernel"
    assert any("in answering" in line for line in failed["last_lines"])
    assert _run("dies")["failed"] == "its process ended: killed by hand"
    with pytest.raises(UserError, match=r"^misses: no such model$"):
        _run("misses")
    assert _run("hangs", timeout=1.0)["failed"] == "not done within 1 s"


def test_of_several_processes_the_first_answers() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert _run("stock", command=torchrun)["ranks"] == "2"
    assert _run("another rank fails", command=torchrun)["failed"] == "ended with 1"
