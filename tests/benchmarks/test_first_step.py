"""The case of the first step, small, on the CPU: figures of both sides, and which cache each run has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.first_step import COMMAND, LONG, STEPS, Length, measure_run, runs, wall_times
from fastpack_trl.measure.record import make_record

TINY = "tiny-qwen3 full 256"


def test_warm_runs_come_after_the_cold_one_that_fills_their_cache() -> None:
    order = list(runs(STEPS))
    assert order == [
        ("stock", "cold", Length((20, 100))),
        ("fastpack", "cold", Length((LONG,), long=True)),
        ("fastpack", "warm", Length((LONG,), long=True)),
        ("fastpack", "cold", Length((20,))),
        ("fastpack", "cold", Length((100,))),
    ]


def test_a_run_of_two_steps_has_its_seconds() -> None:
    found = measure_run({"row": TINY}, "fastpack", steps=(2,), long=False, seed=0)
    assert 0 < found["seconds"][1] < found["seconds"][2] <= found["train_seconds"]
    assert found["step_seconds"] == pytest.approx(found["seconds"][2] - found["seconds"][1])


def test_the_picture_has_a_line_for_each_side_and_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ran = []
    for side, cache, length in (("stock", "cold", Length((2, 3))), ("fastpack", "cold", Length((3,)))):
        found = measure_run({"row": TINY}, side, steps=length.steps, long=length.long, seed=0)
        ran.append({"side": side, "cache": cache, "steps": max(length.steps), "long": length.long, **found})
    ran += [ran[-1] | {"steps": 2, "seconds": {1: 0.5, 2: 0.75}}, {**ran[-1], "cache": "warm", "long": True}]
    ran.append({"side": "fastpack", "cache": "warm", "steps": 2, "long": False, "failed": "not done within 1 s"})
    record = make_record(
        case="first_step", settings={"steps": [2, 3, 9]}, rows=[{"row": TINY, "runs": ran}], complete=True,
        device="cpu", threads=1, seed=0,
    )  # fmt: skip
    file = tmp_path / "first_step.json"
    file.write_text(json.dumps(record))
    (row,) = json.loads(file.read_text())["rows"]
    stock, ours, warm = wall_times(row["runs"], [2, 3, 9])
    assert stock.measured == ran[0]["seconds"]
    assert stock.beyond == {9: pytest.approx(ran[0]["seconds"][3] + 6 * ran[0]["step_seconds"])}
    assert ours.measured == {1: ran[1]["seconds"][1], 2: 0.75, 3: ran[1]["seconds"][3]}
    assert (warm.measured, warm.cache) == ({1: ran[1]["seconds"][1], 3: ran[1]["seconds"][3]}, "warm")
    COMMAND.main(["--from", str(file), "--plot", str(tmp_path / "first_step.png")])
    assert (tmp_path / "first_step.png").read_bytes().startswith(b"\x89PNG")
