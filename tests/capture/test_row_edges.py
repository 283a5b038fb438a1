"""What users do around captured layers of trainers that score completions, beside the same runs without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_material import assert_same, build
from trl.trainer.dpo_trainer import DataCollatorForPreference

import fastpack_trl


def run(name: str, folder: Path, devices: Any, around: Callable[[Any], Any] = lambda made: None, **more: Any) -> Any:
    """A finished run of ours, captured unless `more` says otherwise, which `around` has changed before."""
    options: dict[str, Any] = {"max_steps": 8, "eval_steps": 8, "gradient_checkpointing": False, **more}
    options = {"packed_attention": "varlen", "cuda_graph": "on", **options}
    made = build(name, folder, fast=True, config=getattr(fastpack_trl, f"Fast{name}Config"), **options)
    devices.options["model"] = made.model
    around(made)
    made.train()
    return made


def test_layers_that_do_not_train(tmp_path: Path, devices: Any) -> None:
    """A reward model whose score alone trains."""

    def around(made: Any) -> None:
        made.model.model.requires_grad_(False)

    ours, eager = (run("Reward", tmp_path / one, devices, around, lora=False, cuda_graph=one) for one in ("on", "off"))
    assert "replay" in devices.made[0].log
    assert ours.fastpack_report["cuda_graph"].path == "captured"
    assert_same(ours, eager)


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_collator_of_the_user_is_called_for_batches_only(graph: str, tmp_path: Path, devices: Any) -> None:
    """One may draw from torch's generator, or count."""
    calls: list[int] = []

    class Counting(DataCollatorForPreference):
        def __call__(self, examples: list[Any], *args: Any, **kwargs: Any) -> Any:
            calls.append(len(examples))
            return super().__call__(examples, *args, **kwargs)

    given = {"trainer": {"data_collator": Counting(pad_token_id=0)}, "eval_strategy": "no"}
    ours = run("DPO", tmp_path, devices, cuda_graph=graph, max_steps=20, **given)
    assert ours.fastpack_report["cuda_graph"].path == ("captured" if graph == "on" else "eager")
    assert len(calls) <= 20 + 4  # a loader is one batch ahead, in each epoch of five
