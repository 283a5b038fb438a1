"""The longest row under a cap: the search, and one try of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import memory_caps
from benchmarks.__main__ import main
from benchmarks.memory_caps import longest
from benchmarks.run import train


@given(limit=st.integers(0, 200_000), most=st.sampled_from([4096, 131_072]), multiple=st.sampled_from([64, 256]))
def test_the_row_that_is_found_fits_and_an_eighth_more_does_not(limit: int, most: int, multiple: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= limit

    found = longest(fits, first=2048, most=most, multiple=multiple)
    assert found <= limit
    assert found in (0, *tried)
    best = min(limit, most)
    assert best - found <= max(multiple, found // 8) + multiple
    assert len(tried) == len(set(tried)) <= 20
    assert max(tried) <= most


def test_only_memory_ends_tries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {192: "OutOfMemoryError: CUDA out of memory", 256: "torch.OutOfMemoryError"}

    def process(function: str, options: Mapping[str, Any], timeout: float) -> Any:
        def answer(row: Mapping[str, Any], side: str) -> dict[str, Any]:
            if reason := reasons.get(row["tokens"]):
                return {"failed": reason}
            return {"steps": 2, "seconds": [1.0, 1.0], "tokens": 2 * row["tokens"], "peak_gib": 3.0}

        return answer

    monkeypatch.setattr(memory_caps, "OwnProcess", process)
    words = ["memory_caps", "--models", "tiny", "--sides", "fastpack", "--caps", "16", "--first", "64", "--most", "512"]
    assert main([*words, "--multiple", "64"]) == 0
    assert "| tiny, 16 GiB | fastpack | 1,000.0 | 128 | 192 | 128 |" in capsys.readouterr().out
    for reason in ("ValueError: no such field", "not done within 9 s"):
        reasons[64] = reason
        with pytest.raises(RuntimeError, match=reason):
            main(words)


@pytest.mark.slow
def test_a_try_trains_rows_of_so_many_tokens() -> None:
    row = {"row": memory_caps.MODELS["tiny"], "tokens": 96, "cap": 16.0}
    found = train(row, "fastpack", seed=0, steps=2, threads=1)
    assert found["tokens"] == 2 * 96
