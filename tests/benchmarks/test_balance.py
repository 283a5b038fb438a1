"""The simulation of the balance: dealings are dealings, rows are TRL's, and the page has the figures of the record."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler
from trl import pack_dataset

from benchmarks import balance
from benchmarks.document_lengths import CHAT, CostModel, chat_lengths, long_mix_lengths, pack
from benchmarks.results_folder import RESULTS
from fastpack_trl.errors import UserError

ROOT = Path(__file__).parents[2]
TINY = CostModel("tiny-qwen3", lora=False)
DEALINGS = (balance.stock, balance.even_sums, balance.side_by_side)


@st.composite
def steps_of(draw: Any, most_ranks: int = 9, most_accumulated: int = 5) -> tuple[np.ndarray, int]:
    ranks, accumulated = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_accumulated))
    seed, steps = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 4))
    random = np.random.default_rng(seed)
    if draw(st.booleans()):
        return random.lognormal(0, 1, (steps, ranks * accumulated)), ranks
    return random.integers(1, 4, (steps, ranks * accumulated)).astype(float), ranks  # many of one cost


@pytest.mark.parametrize("dealing", DEALINGS)
@given(drawn=steps_of())
@settings(deadline=None, max_examples=40)
def test_a_dealing_gives_each_micro_batch_of_the_step_once_and_each_rank_as_many(
    dealing: Any, drawn: tuple[np.ndarray, int]
) -> None:
    costs, ranks = drawn
    deal = dealing(costs, ranks)
    assert deal.shape == (len(costs), ranks, costs.shape[1] // ranks)
    assert (np.sort(deal.reshape(costs.shape), axis=1) == np.arange(costs.shape[1])).all()


@given(drawn=steps_of())
@settings(deadline=None, max_examples=80)
def test_no_step_waits_longer_than_stock_s(drawn: tuple[np.ndarray, int]) -> None:
    costs, ranks = drawn
    for one in costs[:, None]:  # each step alone
        for engine, balanced in balance.ENGINES.values():
            before, share = engine(one, balance.stock(one, ranks))
            after, left = engine(one, balanced(one, ranks))
            assert after <= before * (1 + 1e-12)
            assert after >= one.sum() / ranks * (1 - 1e-12)
            assert min(share, left) >= -1e-12


def _best(costs: np.ndarray, ranks: int) -> dict[str, float]:
    """The best time of one step under each engine, over all dealings."""
    orders = np.array(list(itertools.permutations(range(len(costs)))))
    every = costs[orders].reshape(len(orders), ranks, -1)
    return {"ddp": every.sum(2).max(1).min(), "fsdp": every.max(1).sum(1).min()}


@pytest.mark.parametrize(("ranks", "accumulated"), [(2, 2), (2, 3), (3, 2), (4, 2), (2, 4)])
def test_dealings_against_every_dealing_of_tiny_steps(ranks: int, accumulated: int) -> None:
    random = np.random.default_rng(ranks * 10 + accumulated)
    over = []
    for costs in random.lognormal(0, 0.7, (12, ranks * accumulated)):
        best = _best(costs, ranks)
        step = costs[None]
        found, _ = balance.fsdp(step, balance.side_by_side(step, ranks))
        assert found == pytest.approx(best["fsdp"], rel=1e-12)
        found, _ = balance.ddp(step, balance.even_sums(step, ranks))
        over.append(found / best["ddp"] - 1)
    assert max(over) <= 1 / 3  # the bound of largest-first dealing
    assert np.mean(over) <= 0.02


def test_stock_is_the_dealing_of_accelerate() -> None:
    ranks, accumulated = 3, 4
    deal = balance.stock(np.ones((1, ranks * accumulated)), ranks)[0]
    batches = BatchSampler(SequentialSampler(range(ranks * accumulated)), 1, drop_last=False)
    for rank in range(ranks):
        assert [index for (index,) in BatchSamplerShard(batches, ranks, rank)] == deal[rank].tolist()


def test_rows_are_those_that_trl_packs_of_real_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 2_500)
    real = datasets.Dataset.from_dict({"input_ids": [[1] * int(length) for length in lengths]})
    expected = pack_dataset(real, 64)["seq_lengths"]
    assert [row.tolist() for row in pack(lengths, 64)] == list(expected)


@pytest.mark.parametrize("lora", [False, True])
def test_rows_of_equal_tokens_differ_by_their_pairs(lora: bool) -> None:
    model = CostModel("tiny-qwen3", lora)
    per_token, per_pair = model.per_token_and_pair()
    one, two = model.costs([np.array([64]), np.array([32, 32])], attention_rate=0.5)
    assert one - two == pytest.approx(per_pair / 0.5 * (64**2 / 2 - 32**2))
    assert two == pytest.approx(per_token * 64 + per_pair / 0.5 * 32**2)


def test_cost_of_attention_is_forward_backward_recompute_and_the_kernels_own() -> None:
    _, per_pair = TINY.per_token_and_pair()
    layers, heads, width = 3, 4, 16
    assert per_pair == layers * (4 * heads * width) * (1 + 2 + 1 + 0.5)


def test_chat_has_the_published_mean() -> None:
    published = sum(share * mean for share, mean in CHAT) / sum(share for share, _ in CHAT)
    assert published == pytest.approx(846.1, rel=2e-3)  # the total of the table
    assert chat_lengths().mean() == pytest.approx(published, rel=0.02)
    long = long_mix_lengths()
    assert long[len(chat_lengths()) :].sum() / long.sum() == pytest.approx(0.5, abs=0.01)


def test_more_ranks_wait_longer_and_dealing_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "HISTOGRAMS", {"two": lambda: np.array([16, 64])})
    rows = balance.measure(["two"], tokens=[64], ranks=[2, 8], accumulated=[2, 4], models=[TINY], seeds=6)
    assert [row["attention_rate"] for row in rows] == list(balance.RATES)
    (row,) = (row for row in rows if row["attention_rate"] == balance.RATE)
    cells = {(found["ranks"], found["accumulated"]): found for found in row["cells"]}
    assert row["spread"] > 0
    assert row["full_rows"]["ddp"]["saved"] > 0
    for engine in balance.ENGINES:
        assert all(found[engine]["balanced"] < found[engine]["stock"] for found in cells.values())
        assert cells[8, 4][engine]["stock"] > cells[2, 4][engine]["stock"]
        assert cells[8, 4][engine]["saved"] > cells[8, 2][engine]["saved"] > 0
    text = balance.markdown({"rows": rows}, [(8, 4)])
    assert f"{100 * cells[8, 4]['ddp']['saved']:.1f} %" in text.splitlines()[-1]
    with pytest.raises(UserError, match="two"):
        balance.measure(["tow"])


def test_even_costs_leave_nothing_to_save() -> None:
    found = balance.cell(np.full(10, 3.0), ranks=4, accumulated=2, seeds=2)
    assert all(found[engine][key] == 0 for engine in balance.ENGINES for key in ("stock", "balanced", "saved"))


def test_the_page_has_the_figures_of_the_record() -> None:
    (file,) = RESULTS.glob("balance_cpu_*.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    page = (ROOT / "docs/balance.md").read_text(encoding="utf-8")
    assert file.name in page
    assert balance.markdown(record, balance.SHOWN) in page
    rows = [row for row in record["rows"] if row["attention_rate"] == balance.RATE]
    for tokens in balance.TOKENS:
        worth = [
            sum(
                cell[engine]["low"] >= balance.WORTH for row in rows for cell in row["cells"] if _is(row, tokens, model)
            )
            for model in balance.MODELS
            for engine in balance.ENGINES
        ]
        assert f"| {tokens // 1024}k | {' | '.join(map(str, worth))} |" in page
    for row in rows:
        many = [found for found in row["cells"] if found["ranks"] >= 8 and row["tokens"] >= 32_768]
        assert all(found[engine]["low"] >= balance.WORTH for found in many for engine in balance.ENGINES)
    (chat,) = (row for row in rows if row["histogram"] == "chat" and _is(row, 4_096, balance.MODELS[0]))
    for engine in balance.ENGINES:
        saved = [f"{100 * found[engine]['saved']:.1f}" for found in chat["cells"] if found["ranks"] == 8]
        assert f"{', '.join(saved)} % under {engine.upper()}" in page
    for row in (row for row in rows if row["histogram"] == "chat" and row["tokens"] >= 32_768):
        (every,) = (cell for cell in row["cells"] if (cell["ranks"], cell["accumulated"]) == balance.RATE_CELL)
        if row["model"] == balance.MODELS[1].name:
            saved, of_full = (100 * found["ddp"]["saved"] for found in (every, row["full_rows"]))
            assert f"{of_full:.1f} % instead of {saved:.1f} %" in page


def _is(row: dict[str, Any], tokens: int, model: CostModel) -> bool:
    return bool(row["tokens"] == tokens and row["model"] == model.name)
