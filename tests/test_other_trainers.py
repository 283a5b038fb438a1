"""Parts of the package under TRL's other trainers: two steps with the parts and without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from preference_material import DATA, build, trained
from side_by_side import assert_equal
from torch import Tensor
from trainer_material import figures

from fastpack_trl import AsyncCheckpointCallback, ThroughputCallback, apply_lora, apply_moe, packed_attention

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@contextmanager
def together(trainer: Any) -> Any:
    """LoRA, experts, offloaded checkpoints."""
    offload, report = AsyncCheckpointCallback(), apply_lora(trainer.model)
    assert len(report.fast) == 8, report  # q, k, v and o of two layers
    trainer.add_callback(offload)
    with apply_moe(trainer.model) as experts:
        assert [layer.path for layer in experts.layers] == ["fastpack"] * 2, experts
        yield
    report.revert()
    assert offload.use.most_held > offload.use.held == 0


@contextmanager
def exact(trainer: Any) -> Any:
    """Packed attention and throughput, which change no bit."""
    trainer.add_callback(ThroughputCallback())
    with packed_attention(trainer.model) as attention:
        assert attention.path == "per_document"
        yield


def run(name: str, folder: Path, *parts: Any) -> tuple[list[dict[str, float]], dict[str, Tensor], Any]:
    """Two steps; the log, what trained, the trainer."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], target_parameters=STACKS)
    options: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "per_device_train_batch_size": 2}
    options |= {"num_generations": 2, "max_completion_length": 4} if name == "GRPO" else {}
    given = {"fast": False, "family": "qwen3_moe", "data": DATA[name](8), "trainer": {"peft_config": adapter}}
    trainer = build(name, folder, **given, **options)
    before = trained(trainer.model)
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part(trainer))
        trainer.train()
    after = trained(trainer.model)
    assert any(not torch.equal(value, before[key]) for key, value in after.items())
    return figures(trainer), after, trainer


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return cache(lambda name: run(name, tmp_path_factory.mktemp(name)))


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize(("part", "rtol"), [(together, 2e-5), (exact, 0.0)])
@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO"])
def test_two_steps_with_parts_are_those_without(name: str, part: Any, rtol: float, tmp_path: Path, stock: Any) -> None:
    log, ours, trainer = run(name, tmp_path, part)
    expected, reference, _ = stock(name)
    assert sum("loss" in row for row in log) == 2
    assert_equal(log, expected, rtol, rtol / 20)
    # One percent of a step of AdamW, which is as long where a gradient is hardly above its rounding.
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=rtol / 2)
    if part is exact:
        logged = [row for row in trainer.state.log_history if "loss" in row]
        tokens = sum(row["tokens_per_second"] * row["step_time_ms"] / 1e3 for row in logged)
        assert tokens == pytest.approx(logged[-1]["num_tokens"])
