"""The case ``lora``: a row in miniature, its compiled side without a compiler."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import case_tables, lora, step_turns
from benchmarks.cases import Run
from benchmarks.lora_models import MODELS, LoraModel, build, shared_copy
from fastpack_trl.bench.environment import quiet


def test_every_side_trains_the_same_rows_and_is_timed() -> None:
    with quiet():
        task = lora.row_task(Run(rounds=2), MODELS["small"], 128, 1, True, backend="eager")
        found = {**task.label, **task.measure(60.0)}
    assert set(found["sides"]) == set(lora.SIDES)
    for side in found["sides"].values():
        assert len(side["seconds"]["values"]) == len(side["losses"]) == 2
        assert (side["memory"], side["launches"]) == (None, None)  # there is no device here
    assert "compiled by accelerate (eager backend)" in found["sides"]["tuned"]["path"]
    assert set(found["ratios"]) == set(lora.SIDES) - {"fastpack"}
    assert found["documents"]["longest"] <= 128
    assert found["setting"].startswith("small fp32 LoRA, 1 of")


def test_sides_share_the_frozen_base_and_have_adapters_of_their_own() -> None:
    model = build(LoraModel("small", "fp32"), layers=1, positions=16, seed=0, device="cpu")
    ours = dict(shared_copy(model, trained=False).named_parameters())
    for name, parameter in model.named_parameters():
        assert (ours[name] is parameter) == (not parameter.requires_grad)
        assert torch.equal(ours[name], parameter)


def test_the_memory_of_a_side_has_the_base_that_it_shares_and_not_what_others_keep() -> None:
    kept = {"features": {"cache_dequantized": {"reason": "2 GiB of frozen weights kept"}}}
    memory = {"peak_bytes": 5, "reserved_bytes": 7, "before_bytes": 2, "pinned_bytes": 1}
    sides: dict[str, Any] = {
        "stock": {"memory": memory, "seconds": {}}, "tuned": {"failed": "no compiler"},
        "fastpack": {"memory": None, "seconds": {}, "report": kept},
    }  # fmt: skip
    row = {"sides": sides, "isolation": "one process"}
    step_turns.with_shared(row, 100)
    assert memory == {"peak_bytes": 105, "reserved_bytes": 107, "before_bytes": 102, "pinned_bytes": 1}
    assert case_tables._peak(row, "stock") == 105
    assert case_tables._peak(row, "fastpack") == case_tables._peak(row, "tuned") == 0.0
    assert case_tables._peak({"sides": sides}, "stock") == 105 - 2 * 2**30  # a record of before


def test_compiled_sides_may_have_many_graphs_and_keep_one_attention_call(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def turns(*args: Any, **options: Any) -> None:
        limits.append(torch._dynamo.config.recompile_limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(lora, "steps_in_turn", turns)
    before = torch._dynamo.config.recompile_limit
    with pytest.raises(KeyboardInterrupt):
        lora.row_task(Run(rounds=1), LoraModel("small", "fp32"), 64, 1, False).measure(60.0)
    assert limits == [lora.RECOMPILES]
    assert torch._dynamo.config.recompile_limit == before

    def attention(model: Any, path: str, **options: Any) -> Any:
        return contextlib.nullcontext(SimpleNamespace(path=path))

    monkeypatch.setattr(step_turns, "packed_attention", attention)
    monkeypatch.setattr(lora, "compiled_regions", lambda trainer, backend: contextlib.nullcontext())
    for device, path in (("cuda", "varlen"), ("cpu", "auto")):
        trainer = SimpleNamespace(model=None, data_collator=None, args=SimpleNamespace(device=torch.device(device)))
        with lora.packed_and_compiled(trainer) as found:
            assert found == f"{path}, layers compiled by accelerate"
