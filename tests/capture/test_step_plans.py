"""Graphs of runs on images, each of whose steps has a memory plan of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from captured_images import train
from captured_material import capturing
from datasets import concatenate_datasets
from peft import LoraConfig
from trainer_material import callback
from vision_material import image_data

from fastpack_trl.checkpointing.plan import Level
from fastpack_trl.checkpointing.streams import GIB

SMALL, LARGE = 1, 12
"""Images of the only document of a step."""


class Step(NamedTuple):
    """What is seen at the end of one."""

    takes: int
    left: int
    keeps: bool
    keeps_tower: bool
    replays: int
    sizes: int


def steps_of(folder: Path, devices: Any, images: Sequence[int], gib: float, **options: Any) -> tuple[list[Step], Any]:
    """Train one step per number of images; return its steps and the report of `cuda_graph`."""
    found = list[Step]()

    def look(state: Any, model: Any) -> None:
        run, keeps = devices.run, {Level.KEEP}
        step, sizes = run.step, len(run.graphs._buckets.made) if run.graphs else 0
        replays = devices.made[-1].log.count("replay")
        levels = {*step.levels} == keeps
        found.append(
            Step(step.activation_bytes, step.activations_left, levels, run.memory._keeps_tower, replays, sizes)
        )

    data = concatenate_datasets([image_data(1, family="llava", images=count) for count in images])
    options |= {"train_sampling_strategy": "sequential", "data": data, "activation_memory_gib": gib}
    steps = len(images) // options.get("gradient_accumulation_steps", 1)
    options["callbacks"] = [callback("on_step_end", look, "Looks")()]
    ours, _ = train(folder, devices, "llava", max_steps=steps, **options)
    return found, ours.fastpack_report["cuda_graph"]


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: Any) -> tuple[int, int, int]:
    """Bytes of a small and of a large step, and what a budget of 1 GiB leaves of a large one."""
    with capturing(held=0) as devices:
        found, _ = steps_of(tmp_path_factory.mktemp("sizes"), devices, [SMALL] * 3 + [LARGE] * 3, 1.0)
    return found[2].takes, found[5].takes, found[5].left


@pytest.fixture(autouse=True)
def light(devices: Any) -> None:
    """Graphs hold nothing."""
    devices.options["held"] = 0


def test_a_step_without_room_runs_beside_the_graphs(tmp_path: Path, devices: Any, sizes: Any) -> None:
    _, large, left = sizes
    found, line = steps_of(
        tmp_path, devices, [*[SMALL] * 20, LARGE, LARGE, SMALL, SMALL], 1.0 - (left + large / 4) / GIB
    )
    assert (line.status, line.path) == ("on", "captured")
    assert [step.keeps for step in found[18:]] == [True, True, False, False, True, True]
    assert 0 < found[19].replays == found[21].replays < found[23].replays


def test_graphs_that_make_most_steps_recompute_are_dropped(tmp_path: Path, devices: Any, sizes: Any) -> None:
    """Three steps of four keep all where graphs hold nothing, and would recompute for the graph of the fourth."""
    small, large, left = sizes
    devices.options["held"] = 2 * small
    images = [*[SMALL] * 4, *[LARGE, LARGE, LARGE, SMALL] * 6]
    found, line = steps_of(tmp_path, devices, images, 1.0 - (left - large / 10) / GIB)
    assert found[3].replays > 0
    assert all(step.keeps and step.keeps_tower for step in found[12:])
    assert line.path == "eager"
    assert "no graph is left after 28 steps: graphs need" in line.reason


def test_one_large_step_of_many_micro_batches_leaves_the_graphs(tmp_path: Path, devices: Any, sizes: Any) -> None:
    _, large, left = sizes
    images = [each for each in (SMALL, SMALL, SMALL, SMALL, SMALL, LARGE) * 3 for _ in range(4)]
    found, line = steps_of(tmp_path, devices, images, 1.0 - (left + large / 4) / GIB, gradient_accumulation_steps=4)
    assert line.path == "captured"
    assert [step.keeps for step in found] == [True, True, True, True, True, False] * 3
    assert found[16].replays - found[11].replays == 5 * (found[3].replays - found[2].replays) > 0


def test_sizes_of_steps_without_room_get_no_bucket(tmp_path: Path, devices: Any, sizes: Any) -> None:
    _, large, left = sizes
    images = [*[round(LARGE * 1.17**power) for power in range(8)], *[SMALL] * 28]
    found, line = steps_of(tmp_path, devices, images, 1.0 - (left + large / 4) / GIB)
    assert line.path == "captured"
    assert found[7].sizes == 0 < found[-1].replays


@pytest.mark.parametrize("images", [[LARGE] * 3 + [SMALL] * 17, [SMALL] * 17 + [LARGE] * 3], ids=["first", "last"])
def test_dropout_in_a_recompute_concerns_the_steps_that_recompute(
    images: list[int], tmp_path: Path, devices: Any, sizes: Any
) -> None:
    _, large, left = sizes
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    found, line = steps_of(tmp_path, devices, images, 1.0 - (left + large / 4) / GIB, peft_config=lora)
    assert {step.keeps for step in found} == {True, False}
    assert line.path == "captured"
