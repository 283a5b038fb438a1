"""`TrainingRun`: a side in processes of its own, its watch, and a file that is gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_material import make_dataset, make_tokenizer, settings
from trl import SFTConfig, SFTTrainer

from fastpack_trl.bench.result_file import ResultFile, run_rows
from fastpack_trl.bench.run_watch import RunWatch
from fastpack_trl.bench.training_run import OwnProcess, TrainingRun, in_turn, torchrun
from fastpack_trl.errors import UserError
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.testing import tiny_model

ROW = {"row": "tiny", "tokens": 24}


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")


def _process(**changes: Any) -> OwnProcess:
    return OwnProcess("sides_by_name:answering", notes=True, options={"says": "done"}, **changes)


def test_a_process_of_its_own_answers_or_says_why_not() -> None:
    found = _process()(ROW, "stock")
    assert found == {"said": "done", "tokens_seen": 24, "ranks": "1"}
    failed = _process()(ROW, "breaks")
    assert (failed["failed"], failed["noted"]) == ("RuntimeError: no kernel", 1)
    assert any("in answering" in line for line in failed["last_lines"])
    assert _process()(ROW, "dies")["failed"] == "its process ended: killed by hand"
    with pytest.raises(UserError, match=r"^misses: no such model$"):
        _process()(ROW, "misses")
    assert "absent does not run" in _process(python="/absent")(ROW, "stock")["failed"]


def test_a_run_that_takes_too_long_is_ended_and_keeps_its_notes() -> None:
    found = _process(timeout=4.0)(ROW, "hangs")
    assert (found["failed"], found["noted"]) == ("not done within 4 s", 1)


def test_of_several_processes_the_first_answers() -> None:
    several = _process(command=torchrun(2))
    assert several(ROW, "stock")["ranks"] == "2"
    assert several(ROW, "fails beside")["failed"] == "ended with 1"


def test_a_run_that_the_file_has_is_not_run_again(tmp_path: Path) -> None:
    ran: list[tuple[int, str]] = []

    def here(row: Any, side: str) -> dict[str, Any]:
        ran.append((row["round"], side))
        return {"step_seconds": [1.0]}

    def record(rounds: int) -> dict[str, Any]:
        runs = list(in_turn([ROW], ("stock", "fastpack"), rounds=rounds, launcher=here))
        file = ResultFile(tmp_path / "runs.json")
        return run_rows(runs, case="mine", settings={}, file=file, device="cpu", threads=1, seed=0)

    record(1)
    found = record(2)
    assert ran == [(0, "stock"), (0, "fastpack"), (1, "fastpack"), (1, "stock")]
    assert found["complete"]
    assert [row["setting"] for row in found["rows"]] == [
        "tiny, stock, round 0", "tiny, fastpack, round 0", "tiny, fastpack, round 1", "tiny, stock, round 1",
    ]  # fmt: skip
    assert TrainingRun(ROW, "stock", here).label == {**ROW, "side": "stock", "setting": "tiny, stock"}


def test_a_watch_times_the_steps_after_the_warm_up_and_ends_the_run(tmp_path: Path) -> None:
    ready: list[int] = []
    watch = RunWatch(
        warmup=2, timed=4, span=2, profiled=1, shapes=True, multiple=2, settling=1, marks=(1, 5),
        ready=lambda: len(ready) > 0 or ready.append(1) is not None,  # at the second time it is asked
    )  # fmt: skip
    args = settings(tmp_path, max_steps=LONG_RUN, packing=True, logging_steps=2, eval_strategy="no")
    del args["eval_steps"]
    trainer = SFTTrainer(
        tiny_model("qwen3"), args=SFTConfig(**args), train_dataset=make_dataset("text"), callbacks=[watch],
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    found = watch.figures(trainer)
    assert trainer.state.global_step == 4 + 4 + 1  # decided in step 3, settled in 4
    assert (watch.warmup, len(watch.seconds)) == (4, 2)
    assert 0 < watch.marks[1] == watch.first_step < watch.marks[5]
    assert found["timed_tokens"] > 0
    assert set(found["losses"]) == {"2", "4", "6", "8"}
    assert found["profile"]["kernels"] == 0  # on the CPU
    assert watch.events
    assert found["peak_gib"] is found["reserved_gib"] is None
