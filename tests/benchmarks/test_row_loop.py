"""The loop over the rows of a case: what is finished stays finished, whatever ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cases
from benchmarks.__main__ import main
from fastpack_trl.bench import result_file
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError


class Rows:
    """Tasks that note their calls; `fails` by name what measuring raises."""

    def __init__(self, *names: str, **fails: BaseException) -> None:
        self.calls: list[str] = []
        self.shares: list[float] = []
        self.fails = fails
        self.tasks = [
            RowTask({"setting": name, "tokens": 8}, lambda share, n=name: self.run(n, share)) for name in names
        ]

    def run(self, name: str, share: float) -> dict[str, Any]:
        self.calls.append(name)
        self.shares.append(share)
        if name in self.fails:
            raise self.fails[name]
        return {"sides": {"stock": {"losses": (1.0, float("nan"))}}, "call": len(self.calls)}


def run(rows: Rows, file: ResultFile | None = None, **changed: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "case": "made_up", "settings": {"rounds": 2, "documents": (1, 2)}, "apart": {"seconds": 60.0}, "seconds": 60.0,
        "device": "cpu", "threads": 1, "seed": 0,
    }  # fmt: skip
    return run_rows(rows.tasks, file=file, **options | changed)


def names(record: dict[str, Any]) -> list[str]:
    return [row["setting"] for row in record["rows"]]


def test_finished_rows_are_taken_over_and_measured_again_only_when_asked(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    first, second = Rows("a"), Rows("a", "b")
    run(first, file)
    found = run(second, file, seconds=30.0, apart={"seconds": 30.0})
    assert (first.calls, second.calls) == (["a"], ["b"])
    assert names(found) == ["a", "b"]
    assert found["complete"]
    again = Rows("a", "b")
    run(again, ResultFile(file.path, again=True))
    assert again.calls == ["a", "b"]
    assert names(json.loads(file.path.read_text())) == ["a", "b"]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    stopped = run(Rows("a", "b", "c", b=KeyboardInterrupt()), file)
    assert (stopped["complete"], names(stopped)) == (False, ["a"])
    saved = json.loads(file.path.read_text())  # after each row
    assert (saved["complete"], names(saved)) == (False, ["a"])
    rows = Rows("a", "b", "c")
    found = run(rows, file)
    assert rows.calls == ["b", "c"]
    assert (found["complete"], names(found)) == (True, ["a", "b", "c"])


def test_an_interrupt_keeps_the_finished_rows_behind_it(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    run(Rows("c"), file)
    found = run(Rows("a", "b", "c", b=KeyboardInterrupt()), file)
    assert names(found) == ["a", "c"]


def test_a_row_that_fails_is_named_in_one_line_and_the_next_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    file = ResultFile(tmp_path / "x.json")
    found = run(Rows("a", "b", a=torch.OutOfMemoryError("out of\nmemory")), file, progress=True)
    assert "made_up: a, 8 tokens: OutOfMemoryError: out of memory" in capsys.readouterr().err.splitlines()
    assert found["rows"][0]["skipped"] == "OutOfMemoryError: out of memory"
    assert found["rows"][0]["sides"] == {}
    assert "skipped" not in found["rows"][1]
    rows = Rows("a", "b")
    run(rows, file)
    assert rows.calls == ["a"]  # a failure is no measurement


def test_a_loud_error_ends_the_run_and_keeps_the_file(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    with pytest.raises(ArithmeticError):
        run(Rows("a", "b", b=ArithmeticError()), file)  # no failure of a device
    with pytest.raises(LookupError):
        run(Rows("a", "b", b=LookupError()), file, loud=(LookupError,))
    assert names(json.loads(file.path.read_text())) == ["a"]


@pytest.mark.parametrize(
    ("alike", "times", "shares", "said"),
    [
        (False, [0.0, 0.0, 40.0, 40.0, 61.0, 61.0], [20.0, 10.0], "no time left: 0 of 60 s"),
        (True, [0.0, 0.0, 40.0, 40.0, 41.0], [20.0], "no time left: 20 of 60 s, a row took up to 40 s"),
    ],
)
def test_the_budget_is_shared_by_the_rows_that_wait_and_alike_ones_are_not_begun_without_time(
    alike: bool, times: list[float], shares: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(times)
    monkeypatch.setattr(result_file.time, "perf_counter", lambda: next(now))
    rows = Rows("a", "b", "c")
    found = run(rows, alike=alike)
    assert rows.shares == shares
    assert found["rows"][len(shares)]["skipped"] == said
    assert found["complete"]


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"settings": {"rounds": 9, "documents": (1, 2)}}, "settings.rounds: 2 there, 9 here"),
        ({"settings": {"rounds": 2}}, "settings.documents: only there"),
        ({"case": "other"}, "case: made_up there, other here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"threads": 2}, "machine.threads: 1 there, 2 here"),
    ],
)
def test_the_file_of_another_run_is_an_error_that_names_the_difference(
    tmp_path: Path, changed: dict[str, Any], part: str
) -> None:
    file = ResultFile(tmp_path / "x.json")
    run(Rows("a"), file)
    before = file.path.read_text()
    rows = Rows("a")
    with pytest.raises(UserError, match=f"holds another run.*{part}.*--again"):
        run(rows, file, **changed)
    assert (rows.calls, file.path.read_text()) == ([], before)


def test_another_commit_or_version_is_another_run(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.json")
    run(Rows("a"), file)
    for key, name in (("source", "commit"), ("versions", "torch")):
        record = json.loads(file.path.read_text())
        record[key][name] = "older"
        (tmp_path / "y.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=rf"{key}\.{name}: older there"):
            run(Rows("a"), ResultFile(tmp_path / "y.json"))


def test_a_file_that_is_no_record_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "thesis.json"
    file.write_text("[1]")
    assert main(["moe", "--tokens", "64", "--json", str(file)]) == 2
    assert "is no record of a benchmark" in capsys.readouterr().err
    assert file.read_text() == "[1]"


def test_the_load_is_that_of_the_timed_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Load:
        def __init__(self) -> None:
            seen.append("made")

        def restart(self) -> None:
            seen.append("restart")

        def cores(self) -> float:
            return 0.5

    monkeypatch.setattr(cases, "OtherLoad", Load)
    _, load = cases.loaded_turns({"a": lambda: seen.append("a")}, "cpu", rounds=1, warmup=1)
    assert seen == ["made", "a", "restart", "a"]
    assert load == 0.5
