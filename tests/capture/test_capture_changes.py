"""Captured micro-steps while users, callbacks and loaders change things: equal to eager ones, graphs made anew."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from captured_material import CHANGES, At, assert_same_run, both, build, train
from datasets import Dataset
from edited_batches import in_a_loader
from trainer_material import assert_line, callback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.capture import graphs
from fastpack_trl.features import frozen_base


@pytest.mark.parametrize(
    ("acts", "lora"),
    [
        *([[(7, act)], False] for act in (*CHANGES, "evaluation mode", "generate", "raise the rate", "edit frozen")),
        *([[(step, act)], False] for step, act in ((3, "swap data"), (4, "replace forward"), (3, "generate"))),
        *([[(0, "freeze"), (step, "unfreeze")], False] for step in (2, 7)),
        *([[(7, act)], True] for act in ("merge", "disable", "edit base")),
    ],
    ids=lambda value: "-".join(f"{act} {step}" for step, act in value) if isinstance(value, list) else "",
)
def test_what_a_callback_does_in_the_middle_counts_from_then_on(
    tmp_path: Path, devices: Any, acts: list[tuple[int, str]], lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a frozen base weight that is edited while a copy of it in FP8 is in use."""
    if acts[0][1] == "edit base":
        monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")
    options = {"callbacks": [At(*one) for one in acts], "max_steps": 14, "max_grad_norm": 0.0, "weight_decay": 0.1}
    fast = {"frozen_base": "fp8" if acts[0][1] == "edit base" else "as_loaded"}
    ours, eager = both(tmp_path, devices, lora=lora, fast=fast, **options)
    log = devices.made[0].log
    assert log.count("replay") >= 4
    step, act = acts[-1]
    if step == 7 and not lora:
        dropped = log.index("reset") < log.index("together")
        assert dropped == (act in (*CHANGES, "unfreeze")), log
    assert_same_run(ours, eager)


def test_what_is_frozen_gets_no_gradient_in_rows_that_fit_no_bucket(tmp_path: Path, devices: Any) -> None:
    """To an optimizer zeros are not None: it would apply momentum and decay to a frozen weight."""
    seen: list[int] = []

    def look(state: Any, model: Any) -> None:
        weight = model.get_decoder().layers[0].mlp.up_proj.weight
        if not weight.requires_grad and weight.grad is not None:
            seen.append(state.global_step)

    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    texts = [" ".join(words[(i + k) % 10] for k in range(3 if i in (12, 13, 14) else 20)) for i in range(60)]
    looks = callback("on_pre_optimizer_step", look)
    ours, eager = both(
        tmp_path, devices, packing=False, max_steps=20, data=Dataset.from_dict({"text": texts}), weight_decay=0.1,
        callbacks=[looks(), At(12, "freeze")], per_device_train_batch_size=1, shuffle_dataset=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    assert devices.made[0].log.count("replay") >= 4
    assert not seen
    assert_same_run(ours, eager)


def test_a_model_that_changes_again_and_again_runs_eager(tmp_path: Path, devices: Any) -> None:
    swaps = [At(step, "swap data") for step in range(8, 60, 4)]
    trainer = train(tmp_path, devices, callbacks=swaps, max_steps=60)
    assert_line(trainer, "cuda_graph", "again and again", status="off", path="eager")
    assert devices.made[0].log.count("record") > graphs.MAX_RERECORDINGS


def test_hooks_that_came_end_it_and_see_every_row(tmp_path: Path, devices: Any) -> None:
    seen: list[int] = []

    def hooked(model: Any, **_: Any) -> None:
        model.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append(1))

    trainer = train(tmp_path, devices, callbacks=[At(6, hooked)], max_steps=9)
    assert len(seen) == 3
    reason = trainer.fastpack_report["cuda_graph"].reason
    assert "forward hook" in reason
    assert "does not run in a replay" in reason


def test_an_exception_between_replays_leaves_the_model_as_it_was(tmp_path: Path, devices: Any) -> None:
    def stop(**_: Any) -> None:
        raise KeyboardInterrupt

    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[At(7, stop)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    log = devices.made[0].log
    assert log.count("reset") == log.count("record") >= 1
    assert trainer.fastpack_run.graphs is None
    trainer.remove_callback(At)
    trainer.train()
    assert len(devices.made) == 2


def test_two_trainers_have_their_own_graphs(tmp_path: Path, devices: Any) -> None:
    first = build(FastSFTTrainer, tmp_path / "a", devices)

    def another(**_: Any) -> None:
        build(FastSFTTrainer, tmp_path / "b", devices).train()
        devices.options["model"] = first.model

    first.add_callback(At(6, another))
    first.train()
    assert [device.log.count("record") == device.log.count("reset") > 0 for device in devices.made] == [True, True]
    assert devices.made[0].log.count("replay") >= 2


def test_rows_with_edited_labels_are_captured_too(tmp_path: Path, devices: Any) -> None:
    """The head reads the labels of the batch, not those of the collator: graphs have none."""

    def run(setting: str) -> Any:
        turns = cycle((False, True))

        def edit(inputs: Any) -> None:
            if next(turns):
                inputs["labels"][:, 3] = -100

        cls = in_a_loader(FastSFTTrainer, edit)
        trainer = build(cls, tmp_path / setting, devices, fast={"cuda_graph": setting}, max_steps=16)
        trainer.train()
        return trainer

    runs = [run(setting) for setting in ("on", "off")]
    assert devices.made[0].log.count("replay") >= 16, devices.made[0].log
    assert_same_run(*runs)


def test_a_call_that_asks_for_more_than_a_row_is_not_replayed(tmp_path: Path, devices: Any) -> None:
    cls = in_a_loader(FastSFTTrainer, lambda inputs: inputs.update(output_hidden_states=True))
    build(cls, tmp_path, devices).train()
    assert not {"record", "replay"} & set(devices.made[0].log)
