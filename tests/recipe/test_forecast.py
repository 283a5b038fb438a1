"""`doctor --gpu` against the memory records: what a step holds, and the row that is promised to fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hardware_doc import ALL, EXPERTS, NF4, arguments_of

from benchmarks.records import read
from benchmarks.rows import LONGEST_DOCUMENT as DOCUMENT
from fastpack_trl.recipe.forecast import CONTEXT_GIB, Forecast, predict
from fastpack_trl.recipe.gpus import Gpu

GIB = 2**30
ADAPTERS = {"qwen3-8b": ALL, "qwen3-8b-nf4": NF4, "qwen3-14b-nf4": NF4, "gpt-oss-20b-nf4": EXPERTS}
"""Settings of the adapters by the row of the record: the shape, and how its weights are stored."""


class Recorded(NamedTuple):
    model: str
    weights_gib: float
    row: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model} {self.row['tokens']} {self.row['cap_gib']}"


CAPS = [run for run in read() if run["case"] == "memory_caps" and run["side"] == "fastpack"]


def recorded() -> list[Recorded]:
    """Return the rows of ours that were trained; not those that the allocator's cap filled after an out-of-memory."""
    return [
        Recorded(run["row"].partition(",")[0], run["weights_gib"], {"cap_gib": run["cap_gib"]} | tried)
        for run in CAPS
        for tried in run["tries"]
        if not (tried["failed"] or tried["ooms"])
    ]


@cache
def predicted(folder: Path, model: str, gib: float) -> Forecast:
    shape, settings = model.removesuffix("-nf4"), ADAPTERS[model] | {"fused_layers": "off"}  # as recorded
    found = predict(arguments_of(folder, shape, **settings), Gpu("H100", gib, (9, 0)))
    assert not found.unknown
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forecast")


@pytest.mark.slow
@pytest.mark.parametrize("one", recorded(), ids=str)
def test_reserved_memory_without_the_weights_is_within_15_percent_of_the_record(one: Recorded, folder: Path) -> None:
    forecast = predicted(folder, one.model, one.row["cap_gib"])
    parts, plan = forecast.need(one.row["tokens"], DOCUMENT)
    beside = one.row["peak_gib"] - one.weights_gib
    over = sum(parts.values()) / GIB - CONTEXT_GIB - one.row["peak_gib"]
    print(f"{one}: {beside:.2f} GiB beside the weights, {over / beside:+.1%}; {plan}")
    # TRL casts adapters beside a 4-bit base from fp32 to bf16: the record has weighed them before.
    assert (forecast.model.frozen + forecast.model.trained) / GIB == pytest.approx(one.weights_gib, rel=0.02)
    assert abs(over) <= 0.15 * beside


@pytest.mark.slow
@pytest.mark.parametrize("run", CAPS, ids=lambda run: run["row"])
def test_the_longest_row_that_is_promised_was_trained(run: Any, folder: Path) -> None:
    """A row up to an eighth longer than the longest that was trained: the search went by such steps."""
    promised = predicted(folder, run["row"].partition(",")[0], run["cap_gib"]).longest_row()
    most = max(131_072, *(tried["tokens"] for tried in run["tries"]))  # of the search
    assert 0.6 * run["largest"] <= min(promised, most) <= run["largest"] * 1.125
