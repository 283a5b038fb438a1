"""The record of the tests marked ``cuda``: what it counts, and that it is not made without a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.cuda_tests import COMMAND, run_tests, said
from benchmarks.readme import numbers
from benchmarks.stale import rooms_of
from fastpack_trl.errors import UserError
from fastpack_trl.measure.code_hash import BENCHMARKS, code_hashes
from fastpack_trl.measure.record import make_record

TESTS = """
import pytest

def test_right(): pass

def test_wrong(): assert 1 == 2

@pytest.mark.skip(reason="no such device")
def test_left_out(): pass

@pytest.fixture
def broken(): raise OSError("broken")

def test_not_reached(broken): pass

@pytest.mark.cuda
def test_of_another_marker(): pass
"""


def test_each_test_is_counted_once_and_failures_and_skips_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_few.py"
    file.write_text(TESTS, encoding="utf-8")
    found = run_tests(0, [str(file), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)], "not cuda")
    assert [found[name] for name in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert [name.partition("::")[2] for name in found["failures"]] == ["test_not_reached", "test_wrong"]
    assert list(found["skips"].values()) == ["no such device"]
    assert found["seconds"] > 0

    settings = {"marker": "cuda", "workers": 14, "pytest": []}
    record = make_record(case="cuda_tests", settings=settings, rows=[found], complete=True, threads=1, seed=0)
    text = said("few.json", record)
    assert text in numbers({"few.json": record})
    assert "1 passed, **2 failed** (" in text
    assert "`python -m benchmarks.cuda_tests --workers 14 --json FILE`" in text
    assert set(rooms_of(record)) == set(code_hashes()) - {BENCHMARKS}, "any change of the package makes it old"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="torch sees no CUDA device here; make test runs the rest"):
        COMMAND.main(["--json", str(tmp_path / "tests.json")])
    assert not (tmp_path / "tests.json").exists()
