"""The case of memory caps: the row that is predicted, the rows around it, and both sides of a tiny model on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import forks
import pytest
import torch

from benchmarks import caps_side, memory_caps
from benchmarks.caps_search import MULTIPLE, Curve, largest_row
from benchmarks.caps_side import BEFORE_LONG, DEEPEST, LONG, OURS, STEPS, measure_side, rows_of
from benchmarks.readme_runs import caps_not_reached
from fastpack_trl.bench.training_run import OwnProcess
from fastpack_trl.errors import UserError

GIB = 2**30


class Device:
    """Rows up to a size fit; the rows that were run are kept."""

    def __init__(self, size: int, rows: int = 99) -> None:
        self.size, self.left = size, rows
        self.ran: list[int] = []

    def __call__(self, tokens: int) -> bool | None:
        if not self.left:
            return None
        self.left -= 1
        self.ran.append(tokens)
        return tokens <= self.size


@pytest.mark.parametrize("size", [300, 5_000, 8_192, 8_700, 9_216, 20_000])
@pytest.mark.parametrize("guess", [1, 4_000, 8_192, 10_000])
def test_the_largest_row_is_one_that_fits_and_the_next_longer_one_does_not(size: int, guess: int) -> None:
    device = Device(size)
    found = largest_row(device, guess, longest=131_072, tries=40)
    assert found in device.ran
    assert found <= size
    assert min(tokens for tokens in device.ran if tokens > size) <= max(found / (7 / 8) + MULTIPLE, found + MULTIPLE)
    assert all(tokens % MULTIPLE == 0 for tokens in device.ran)


def test_a_right_prediction_costs_two_rows_and_one_that_is_a_step_too_long_two() -> None:
    device = Device(10_000)
    assert (largest_row(device, 9_500, longest=99_999), device.ran) == (9_472, [9_472, 10_496])
    device = Device(9_000)
    assert (largest_row(device, 9_500, longest=99_999), device.ran) == (8_192, [9_472, 8_192])


def test_rows_end_at_the_longest_at_the_number_of_tries_and_where_time_ends() -> None:
    device = Device(99_999)
    assert (largest_row(device, 50_000, longest=4_096), device.ran) == (4_096, [4_096])
    assert largest_row(device := Device(0), 8_192, longest=99_999, tries=3) == 0
    assert len(device.ran) == 3
    assert largest_row(device := Device(99_999, rows=2), 8_192, longest=99_999) == 9_216
    assert len(device.ran) == 2


def test_the_curve_is_the_parabola_where_rows_grow_by_the_square_and_else_the_line() -> None:
    def masks(tokens: int) -> int:
        return 3 * GIB + 700_000 * tokens + 3 * tokens**2

    curve = Curve.through([(tokens, masks(tokens)) for tokens in (8192, 2048, 4096)])
    assert curve.at(30_000) == pytest.approx(masks(30_000), rel=1e-6)
    row = curve.tokens(24 * GIB, 131_072)
    assert masks(row) <= 24 * GIB < masks(row + MULTIPLE)
    assert curve.tokens(2 * GIB, 131_072) == 0
    assert curve.tokens(1e15, 131_072) == 131_072
    flattening = Curve.through([(2048, 5 * GIB), (4096, 7 * GIB), (8192, 9 * GIB)])
    assert flattening.at(16_384) == 13 * GIB
    with pytest.raises(ValueError, match="1 of the rows"):
        Curve.through([(2048, GIB)])


def test_packing_makes_full_rows_of_the_documents(tmp_path: Path) -> None:
    from trl import pack_dataset

    packed = pack_dataset(rows_of(5_000, 3, 500, seed=0).with_format("arrow"), 5_000, "bfd")
    assert [len(ids) for ids in packed["input_ids"]] == [5_000] * 3


def test_both_sides_train_each_row_of_a_cap_and_ours_also_the_row_of_stock() -> None:
    noted: list[int] = []
    common: dict[str, Any] = {"longest": 512, "probes": (128, 256), "seed": 0, "seconds": 600.0}
    row = {"row": "tiny"}
    stock = measure_side(
        row, "stock", caps=[1.0, 2.0], beside={}, note=lambda found: noted.append(len(found["rows"])), **common
    )
    ours = measure_side(row, OURS, caps=[1.0], beside={"1": 256}, **common)
    assert stock["largest"] == {"1": 512, "2": 512}
    assert [(one["cap_gib"], one["tokens"]) for one in stock["rows"]] == [
        (None, 128), (None, 256), (1.0, 512), (2.0, 512)
    ]  # fmt: skip
    assert sorted(set(noted)) == [1, 2, 3, 4]
    probes, (largest, beside) = ours["rows"][:2], ours["rows"][2:]
    on_cpu = DEEPEST | {"activation_memory": "checkpoint"}
    assert all(one["settings"] == on_cpu and one["plan"]["text"].startswith("checkpoint 0-2") for one in probes)
    assert (largest["tokens"], beside["tokens"], beside["settings"]) == (512, 256, LONG)
    for one in stock["rows"] + ours["rows"]:
        before = BEFORE_LONG if one is beside else 0
        assert len(one["step_seconds"]) == before + STEPS
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / median(one["step_seconds"][before + 1 :]))
    assert stock["rows"][2]["losses"] == pytest.approx(largest["losses"], rel=1e-2)


def test_a_row_that_fails_is_named_and_a_row_without_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import get_peft_model

    model, peft_config = caps_side.model_of(caps_side.WORKLOADS["tiny-gpt-oss"], 256, "cpu", 0)
    side = caps_side.Side(get_peft_model(model, peft_config), "stock", "cpu", seed=0, seconds=60.0)

    def fail(*args: Any) -> None:
        # Made here: one that is kept has the frames of its traceback, and with them the hooks of torch's checkpoint.
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    handle = side.model.base_model.model.model.layers[1].register_forward_hook(fail)
    assert side.fits(128) is False
    assert side.rows[-1]["failed"].startswith("OutOfMemoryError")
    handle.remove()
    assert side.fits(128) is True
    side.seconds = 0.0
    side.__post_init__()
    assert side.fits(128) is None
    assert side.rows[-1]["skipped"] == "not within 0 s"


def test_a_process_is_written_and_not_run_again_and_the_table_says_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "caps.json"
    small = ["tiny", "--caps", "1", "--longest", "256", "--probes", "64", "128", "--seconds", "300"]
    small += ["--json", str(file)]
    monkeypatch.setattr(sys, "executable", forks.python())
    memory_caps.COMMAND.main([*small, "--sides", "stock"])
    first = json.loads(file.read_text())
    asked: list[Any] = []

    def fails(self: OwnProcess, row: Any, side: str) -> dict[str, Any]:
        asked.append((row["row"], side, self.options["beside"]))
        rows = [{"cap_gib": 2.0, "tokens": 1_024, "skipped": "not within 1 s"}]
        return {
            "failed": "not done within 1 s", "largest": {"1": 0, "2": 0}, "too_small": {"1": "weights 2.0 GiB"},
            "predicted": {"2": 1_024}, "rows": rows,
        }  # fmt: skip

    monkeypatch.setattr(OwnProcess, "__call__", fails)
    memory_caps.COMMAND.main([*small, "--sides", OURS, "stock"])
    both = json.loads(file.read_text())
    assert asked == [("tiny", OURS, {"1": 256})]
    assert [row["side"] for row in both["rows"]] == ["stock", OURS]
    assert both["rows"][0] == first["rows"][0]
    text = memory_caps.table(both)
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["1", "stock"]]
    assert line.split()[2:4] == ["256", "1.00x"]
    assert f"{OURS}: not done within 1 s" in text
    assert f"{OURS}, 1 GiB: does not fit: weights 2.0 GiB" in text
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["2", OURS]]
    assert line.split()[2:4] == ["(1,024)", "-"]
    with pytest.raises(UserError, match="'tinny'"):
        memory_caps.COMMAND.main(["tinny"])


def test_the_page_names_the_caps_that_time_did_not_reach() -> None:
    late = {"skipped": "not within 90 s"}
    stock = {"largest": {"16": 512, "24": 0}, "rows": [{"cap_gib": 16.0}, {"cap_gib": 24.0, **late}]}
    longer_skipped = {"largest": {"16": 512}, "rows": [{"cap_gib": None, **late}, {"cap_gib": 16.0, **late}]}
    record = {
        "settings": {"seconds": 90.0},
        "rows": [{"model": "a", "sides": {"stock": stock, "fastpack": longer_skipped}}],
    }
    assert list(caps_not_reached(record)) == ["Not measured within the 90 s of a side: a: stock at 24 GiB."]
    record["rows"][0]["sides"]["stock"] = longer_skipped
    assert list(caps_not_reached(record)) == []
