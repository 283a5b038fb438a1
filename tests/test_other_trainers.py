"""Parts of the package under TRL's other trainers: two steps with each part and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_material import HostStreams
from peft import LoraConfig
from preference_material import DATA, build, trained
from side_by_side import assert_equal
from torch import Tensor
from trainer_material import figures

from fastpack_trl import AsyncCheckpointCallback, ThroughputCallback, apply_lora, apply_moe, packed_attention

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RTOL, ATOL = 2e-5, 1e-6  # of fp32 products in another order; TRL logs means of a few dozen tokens


NAMES = ("DPO", "KTO", "Reward", "GRPO")
FIELDS = {"GRPO": {"num_generations": 2, "max_completion_length": 4}}


@contextmanager
def _lora(trainer: Any) -> Iterator[None]:
    report = apply_lora(trainer.model)
    assert len(report.fast) == 8, report  # q, k, v and o of two layers
    yield
    report.revert()


@contextmanager
def _moe(trainer: Any) -> Iterator[None]:
    with apply_moe(trainer.model) as report:
        assert [layer.path for layer in report.layers] == ["fastpack"] * 2, report
        yield


@contextmanager
def _offload(trainer: Any) -> Iterator[None]:
    added = AsyncCheckpointCallback()
    added._options = {"min_bytes": 1, "streams": HostStreams}  # a machine without a device
    trainer.add_callback(added)
    yield
    assert added.use is not None
    assert added.use.most_held > added.use.held == 0


@contextmanager
def _attention(trainer: Any) -> Iterator[None]:
    with packed_attention(trainer.model) as attention:
        assert attention.path == "per_document"
        yield


PARTS = {
    "together": (_lora, _moe, _offload), "lora": (_lora,), "moe": (_moe,), "offload": (_offload,),
    "attention": (_attention,),
}  # fmt: skip
EXACT = ("offload", "attention")
"""Parts that give the same bits."""


def _train(name: str, folder: Path, *parts: Any) -> tuple[list[dict[str, float]], dict[str, Tensor], Any]:
    """Two steps; the log, what trained, the trainer."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=STACKS)
    options = {"max_steps": 2, "eval_strategy": "no", "per_device_train_batch_size": 2, **FIELDS.get(name, {})}
    given = {"fast": False, "family": "qwen3_moe", "data": DATA[name](8), "trainer": {"peft_config": adapter}}
    trainer = build(name, folder, **given, **options)
    before = trained(trainer.model)
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part(trainer))
        trainer.train()
    after = trained(trainer.model)
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
    log = [{key: value for key, value in row.items() if key != "step_time"} for row in figures(trainer)]
    return log, after, trainer


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function from a trainer's name to its run without any part."""
    return cache(lambda name: _train(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_with_a_part_are_those_without(name: str, part: str, tmp_path: Path, stock: Any) -> None:
    log, ours, _ = _train(name, tmp_path, *PARTS[part])
    expected, reference, _ = stock(name)
    assert sum("loss" in row for row in log) == 2
    rtol, atol = (0.0, 0.0) if part in EXACT else (RTOL, ATOL)
    assert_equal(log, expected, rtol, atol)
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_throughput_counts_the_tokens_that_the_trainer_counts(name: str, tmp_path: Path) -> None:
    _, _, trainer = _train(name, tmp_path, lambda trainer: nullcontext(trainer.add_callback(ThroughputCallback())))
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["tokens_per_second"] > 0 for row in logged)
    assert sum(row["tokens_per_second"] * row["step_time_ms"] / 1e3 for row in logged) == pytest.approx(
        logged[-1]["num_tokens"]
    )
