"""Captured micro-steps: which rows are recorded and replayed, and what they add; replays by the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import STEPS, assert_same_run, both, build, train
from trainer_material import assert_line, make_dataset
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.capture import slot
from fastpack_trl.testing import tiny_model

UNMERGED, MERGED = {"merge_accumulation": "off"}, {"merge_accumulation": "on"}
ACCUMULATED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 12}
RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "gemma3-lora": ({"family": "gemma3_text", "lora": True}, 6),
    "qwen3_moe-lora": ({"family": "qwen3_moe", "lora": True}, 6),
    "gpt_oss": ({"family": "gpt_oss"}, 6),
    "micro-batches": (ACCUMULATED | {"fast": UNMERGED}, 2 * 3 * 5),
    "merged": (ACCUMULATED | {"fast": MERGED}, 2 * 5),
    "few tokens count": ({"data": "prompt_completion", "max_steps": 12}, 6),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 2}, 4),
    "padded": ({"pad_to_multiple_of": 8}, 6),
    "streamed": ({"data": make_dataset("text", 200).to_iterable_dataset(), "max_steps": 30}, 4),
}
"""Options of a run, and the least number of replays, forward and backward."""


@pytest.mark.parametrize("name", RUNS)
def test_a_captured_run_trains_as_an_eager_one(tmp_path: Path, devices: Any, name: str) -> None:
    options, replays = RUNS[name]
    ours, eager = both(tmp_path, devices, **options)
    (device,) = devices.made
    assert device.log.count("replay") >= replays, device.log
    assert device.log[0] == "apart"
    assert device.log[-1] == "forget"
    assert device.log.count("reset") == device.log.count("record") >= 2
    assert_same_run(ours, eager)
    assert_line(ours, "cuda_graph", "3.00 GiB", status="on", path="captured")


@pytest.mark.parametrize("options", [{"lora": {"task_type": "CAUSAL_LM"}}, {"family": "gpt_oss"}], ids=["lora", "moe"])
def test_layers_get_the_keywords_of_an_eager_step(
    tmp_path: Path, devices: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Layers are compiled again for other keywords (PEFT adds two without a value), and for other strides."""
    model = tiny_model(options.get("family", "qwen3"))
    kind, static = type(model.get_decoder().layers[0]), []
    forward, run_eagerly = kind.forward, slot.Slot.run_eagerly
    keywords: dict[bool, set[Any]] = {True: set(), False: set()}

    def seen(self: Any, hidden: torch.Tensor, **given: Any) -> Any:
        if self.training:
            keywords[bool(static)].add(frozenset((name, described(value)) for name, value in given.items()))
        return forward(self, hidden, **given)

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.dim(), value._is_view(), value.stride() == torch.empty(value.shape).stride()
        return (type(value), *map(described, value if isinstance(value, tuple) else ()), value is True)

    def of_a_slot(self: slot.Slot, *row: Any) -> Any:
        static.append(self)
        try:
            return run_eagerly(self, *row)
        finally:
            static.clear()

    monkeypatch.setattr(kind, "forward", seen)
    monkeypatch.setattr(slot.Slot, "run_eagerly", of_a_slot)
    build(FastSFTTrainer, tmp_path, devices, model=model, **options).train()
    assert devices.made[0].log.count("replay") >= 2
    assert keywords[True] == keywords[False]
    assert len(keywords[True]) == 1


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit", "adamw_torch"])
def test_steps_of_bitsandbytes_are_ordered_with_captured_ones(tmp_path: Path, devices: Any, optim: str) -> None:
    if "torch" not in optim:
        pytest.importorskip("bitsandbytes")
    ours, eager = both(tmp_path, devices, optim=optim)
    assert_same_run(ours, eager)
    assert ours.fastpack_report["cuda_graph"].path == "captured"
    ordered = [entry for entry in devices.made[0].log if entry.startswith(("order", "leave"))]
    assert ordered == ([] if "torch" in optim else ["order AdamW", "leave AdamW"])


def test_gradients_are_as_in_stock_between_steps(tmp_path: Path, devices: Any) -> None:
    """None after `zero_grad`; a parameter that no loss reaches never gets one, which AdamW would take for zeros."""
    seen: list[tuple[bool, bool]] = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen.append((model.unused.grad is None, all(p.grad is not None for p in model.model.parameters())))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            assert all(p.grad is None for p in model.parameters())

    model = tiny_model("qwen3")
    model.unused = torch.nn.Parameter(torch.ones(3))
    train(tmp_path, devices, callbacks=[Looks()], model=model, weight_decay=0.1)
    assert devices.made[0].log.count("replay") >= 2
    assert seen == [(True, True)] * STEPS
    assert torch.equal(model.unused, torch.ones(3))


def test_buckets_share_the_largest_ones_memory(tmp_path: Path, devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later frees their graphs: they lie in its memory then."""
    alive: dict[slot.Slot, int] = {}
    orders: list[list[int]] = []
    record, reset = slot.Slot.record, slot.Slot.reset

    def recorded(self: slot.Slot, *args: Any) -> None:
        record(self, *args)
        alive[self] = self.inputs.bucket.tokens
        orders.append(list(alive.values()))

    def dropped(self: slot.Slot) -> None:
        reset(self)
        alive.pop(self, None)

    monkeypatch.setattr(slot.Slot, "record", recorded)
    monkeypatch.setattr(slot.Slot, "reset", dropped)
    options = {"data": "prompt_completion", "packing": False, "per_device_train_batch_size": 2, "max_steps": 24}
    ours, eager = both(tmp_path, devices, **options)
    assert_same_run(ours, eager)
    assert max(map(len, orders)) >= 2
    assert all(order[0] == max(order) for order in orders), orders
