"""Each optimisation by itself: its arithmetic, its sides on tiny models, and what a row says of both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import by_itself_metadata, by_itself_routing
from benchmarks.arithmetic import Saved, metadata_saved, published_checks, reload_saved, routing_saved, sound
from benchmarks.by_itself import COMMAND, OPTIMISATIONS, PUBLISHED, ROWS, table
from benchmarks.by_itself_row import Pass, row_of
from fastpack_trl.measure.timing import WallClock


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (metadata_saved(16, 2.0, recomputed=False), Saved(30.0, 0.0)),
        (metadata_saved(16, 2.0, recomputed=True), Saved(30.0, 32.0)),
        (reload_saved(3, 100.0, 50.0, layer_backward=5.0), Saved(0.0, 4.0)),  # hidden behind a layer
        (reload_saved(3, 100.0, 50.0, layer_backward=0.5), Saved(0.0, 1.0)),  # as far as that lasts
        (routing_saved(2, (5.0, 7.0), (1.0, 2.0), recomputed=False), Saved(8.0, 10.0)),
        (routing_saved(2, (5.0, 7.0), (1.0, 2.0), recomputed=True), Saved(8.0, 18.0)),
    ],
)
def test_each_pass_is_spared_what_is_made_once_hidden_or_sorted_once(saved: Saved, expected: Saved) -> None:
    assert saved == expected


def test_the_arithmetic_predicts_what_others_have_published() -> None:
    checks = published_checks()
    assert len(checks) == 5
    for name, predicted, published in checks:
        assert sound(predicted, published), name
    assert not sound(1.0, 2.0)
    assert not sound(1.0, 0.0)


def test_every_published_figure_has_a_row() -> None:
    rows = [row for one in OPTIMISATIONS.values() for row in one.rows]
    assert PUBLISHED.keys() == ROWS.keys()
    for name in PUBLISHED:
        assert any(row.startswith(name) for row in rows), name
    for one in OPTIMISATIONS.values():
        assert one.rows.keys() == one.tiny.keys()


def test_a_row_compares_the_two_sides_that_differ_in_one_thing() -> None:
    def passes(seconds: float, loss: float = 2.0, peak: int = 2**30) -> list[Pass]:
        return [Pass(seconds / 4, 3 * seconds / 4, seconds, loss, peak)] * 6

    sides = {"off": passes(1.0), "on": passes(0.8, peak=2**31), "other": passes(0.5, loss=3.0)}
    row = row_of(sides, {"last": "OutOfMemoryError"}, "off", "on", Saved(0.1, 0.06), {}, tolerance=0.01)
    assert row["gains"]["seconds"]["median"] == row["gains"]["forward"]["median"] == pytest.approx(1.25)
    assert row["saved_seconds"] == pytest.approx(0.2)
    assert row["sound"]  # 0.16 of 0.2
    assert row["extra_bytes"] == 2**30
    assert "its loss is 5.00e-01 off that of off" in row["sides"]["other"]["failed"]
    assert row["sides"]["last"] == {"failed": "OutOfMemoryError"}
    unsure = row_of(sides, {}, "off", "other", Saved(0.1, 0.06), {}, tolerance=0.01)
    assert "gains" not in unsure


def test_both_dispatches_sum_the_same_experts() -> None:
    hidden = torch.randn(10, 4, dtype=torch.float64)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(10)])
    weights = torch.rand(10, 2, dtype=torch.float64)

    def expert(number: int, rows: Tensor) -> Tensor:
        return rows * (int(number) + 1)

    loop, once = (call(hidden, ids, weights, 5, expert) for call in by_itself_routing.DISPATCHES.values())
    expected = hidden * ((ids + 1) * weights).sum(1, keepdim=True)
    torch.testing.assert_close(loop, expected)
    torch.testing.assert_close(once, expected)


@pytest.mark.parametrize(
    ("name", "row"),
    [("metadata", "qwen3-0.6b"), ("reload", "qwen3-8b-reload"), ("routing", "gpt-oss-20b-routing-2048")],
)
def test_every_side_of_an_optimisation_trains_to_the_same_loss(name: str, row: str) -> None:
    record = COMMAND.measure(COMMAND.arguments([name, row, "--tiny", "--rounds", "1"]), progress=False)
    (found,) = record["rows"]
    assert not [side["failed"] for side in found["sides"].values() if "failed" in side]
    assert len(found["sides"]) == 3
    assert set(found["gains"]) == {"forward", "backward", "seconds"}
    assert found["predicted"]["backward"] >= 0
    text = table(record)
    assert f"| {row}, " in text
    assert "published by others" in text
    assert "%, " not in text.splitlines()[4].rpartition("|")[0].rpartition("|")[2]  # nothing published of a tiny model


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIMISATIONS)
def test_on_a_gpu_every_row_has_its_sides_and_its_memory(name: str) -> None:
    args = COMMAND.arguments([name, "--tiny", "--rounds", "2"])
    for row in COMMAND.measure(args, progress=False)["rows"]:
        assert not [side["failed"] for side in row["sides"].values() if "failed" in side], row["row"]
        assert row["extra_bytes"] is not None
        assert row["predicted"]["backward"] > 0
        assert all(value > 0 for part in ("forward", "backward") for value in row["sides"][row["on"]][part]["values"])


def test_a_rebuild_is_timed_over_the_documents_of_the_rows() -> None:
    assert by_itself_metadata.rebuild_seconds([[3, 2], [5]], "cpu", WallClock()) > 0
