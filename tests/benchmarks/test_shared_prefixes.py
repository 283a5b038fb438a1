"""``python -m benchmarks.shared_prefixes`` in miniature, on the CPU."""

from __future__ import annotations

import pytest

from benchmarks import shared_prefixes
from benchmarks.record_commands import command_of
from benchmarks.shared_prefixes import COMMAND, WHOLE, Row
from benchmarks.step_turns import OURS, STOCK


def test_documents_are_what_their_row_says() -> None:
    found = Row(30, 20, completions=True).documents(2000, 500, 0)
    assert sum(map(len, found["input_ids"])) >= 2000
    assert len({tuple(ids[:30]) for ids in found["input_ids"]}) == 1
    for ids, labels in zip(found["input_ids"], found["labels"], strict=True):
        assert labels == [-100] * 30 + ids[30:]
        assert 10 <= len(ids) - 30 <= 30


def test_a_miniature_run_times_the_same_rows_on_all_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"alike": Row(40, 20), "nothing": Row(0, 40, setting="on")}
    monkeypatch.setattr(shared_prefixes, "ROWS", rows)
    assert COMMAND.arguments([]).sides == [WHOLE, OURS]
    args = COMMAND.arguments(["--sides", STOCK, WHOLE, OURS, "--of", "tiny-qwen3", "--tokens", "512", "--rounds", "2"])
    args.rows = list(rows)
    record = COMMAND.measure(args, progress=False)
    found = {row["row"]: row["sides"] for row in record["rows"]}
    assert list(found["alike"]) == list(found["nothing"]) == [STOCK, WHOLE, OURS]
    assert found["alike"][OURS]["computed"] < 0.6
    assert found["nothing"][OURS]["computed"] == found["alike"][WHOLE]["computed"] == 1.0
    rates = [found["alike"][side]["token_rates"]["capacity"]["median"] for side in (OURS, WHOLE)]
    seconds = [found["alike"][side]["seconds"]["median"] for side in (OURS, WHOLE)]
    assert rates[0] / rates[1] == pytest.approx(seconds[1] / seconds[0], rel=0.2), "tokens of the documents on both"
    text = shared_prefixes.table(record)
    assert "tokens computed" in text
    page = shared_prefixes.markdown(record)
    assert all(f"| {name} |" in page for name in rows)
    assert f"| {found['alike'][OURS]['computed']:.0%} |" in page
    assert command_of(record) == (
        'python -m benchmarks.shared_prefixes --rows "alike" "nothing" '
        '--sides "stock" "each document whole" "fastpack" --of tiny-qwen3 --tokens 512 --rounds 2 --json FILE'
    )
