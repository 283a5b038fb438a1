"""Trainers that score completions, their layers captured: equal to the same runs without, and what makes them eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_same, build, trained
from transformers import TrainerCallback

import fastpack_trl
from fastpack_trl.capture.graphs import BackboneGraphs

CAPTURED = {"packed_attention": "varlen", "cuda_graph": "on", "share_prefixes": "auto"}


def run(name: str, folder: Path, devices: Any, around: Callable[[Any], Any] = lambda made: None, **options: Any) -> Any:
    """A finished run of ours, which `around` has changed before; the graphs of its device are in ``devices.made``."""
    settings = {"max_steps": 8, "eval_steps": 8, "gradient_checkpointing": False, **CAPTURED, **options}
    config = getattr(fastpack_trl, f"Fast{name}Config")
    made = build(name, folder, fast=True, config=config, **settings)
    devices.options["model"] = made.model
    around(made)
    made.train()
    return made


def both(name: str, folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    return (
        run(name, folder / "on", devices, **options),
        run(name, folder / "off", devices, **options | {"cuda_graph": "off"}),
    )


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("DPO", True),
        ("DPO", False),
        ("KTO", True),
        ("Reward", True),
        ("Reward", False),
        ("GRPO", True),
        ("RLOO", False),
    ],
)
def test_captured_runs_equal_eager_ones(name: str, lora: bool, tmp_path: Path, devices: Any) -> None:
    ours, eager = both(name, tmp_path, devices, lora=lora)
    assert "replay" in devices.made[0].log
    report = ours.fastpack_report
    assert (report["cuda_graph"].path, report["share_prefixes"].path) == ("captured", "prompts once")
    assert_same(ours, eager)
    expected = trained(eager.model)
    for key, value in trained(ours.model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
    ],
)
def test_settings_of_a_run(options: dict[str, Any], tmp_path: Path, devices: Any) -> None:
    ours, eager = both("DPO", tmp_path, devices, **options)
    assert "replay" in devices.made[0].log
    assert_same(ours, eager)


def test_reference_and_policy_have_graphs_of_their_own(tmp_path: Path, devices: Any) -> None:
    made = run("DPO", tmp_path, devices)
    assert devices.made[0].log.count("record") >= 3  # forward and backward of the policy, forward of the reference
    assert made.fastpack_run.get_state(BackboneGraphs) is None


def test_a_hook_of_the_user_ends_it_by_name(tmp_path: Path, devices: Any) -> None:
    class Hooks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                layers = kwargs["model"].get_base_model().model.layers
                layers[0].mlp.register_forward_hook(lambda *_: seen.append(state.global_step))

    seen: list[int] = []
    ours = run("DPO", tmp_path, devices, trainer={"callbacks": [Hooks()]})
    assert seen, "the hook runs for each forward"
    line = ours.fastpack_report["cuda_graph"]
    assert line.status == "off"
    assert "does not run in a replay: remove it" in line.reason


def test_layers_that_do_not_train(tmp_path: Path, devices: Any) -> None:
    """A reward model whose score alone trains."""

    def around(made: Any) -> None:
        made.model.model.requires_grad_(False)

    ours, eager = both("Reward", tmp_path, devices, around=around, lora=False)
    assert "replay" in devices.made[0].log
    assert ours.fastpack_report["cuda_graph"].path == "captured"
    assert_same(ours, eager)
