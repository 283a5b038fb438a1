"""Memory per GPU of several: what DDP copies and FSDP 2 shards, counted by hand, and against the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hardware_doc import ALL, EXPERTS, NF4, arguments_of

from benchmarks.records import read
from fastpack_trl.recipe.forecast import CONTEXT_GIB, NCCL_GIB, fixed_bytes, forecast, model_of
from fastpack_trl.recipe.gpus import GPUS

GIB, GPUS_OF_A_RUN = 2**30, 4
DDP = replace(GPUS["H100"], processes=GPUS_OF_A_RUN)
FSDP2 = replace(DDP, shards=True)
SYNCED = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def figures(folder: Path, gpu: Any, **settings: Any) -> tuple[Any, dict[str, float]]:
    arguments = arguments_of(folder, "qwen3-0.6b", 2, bf16=True, **settings)
    model = model_of(arguments)
    return model, fixed_bytes(model, arguments, gpu)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ddp_holds_all_and_buckets_and_fsdp_2_shards_fp32(tmp_path: Path, dtype: str) -> None:
    settings, width = {"use_peft": False, "dtype": dtype}, 2 if dtype == "bfloat16" else 4
    for gpu, each in ((DDP, width), (FSDP2, 4 / GPUS_OF_A_RUN)):
        model, parts = figures(tmp_path, gpu, **settings)
        assert parts["trained weights"] == parts["gradients"] == parts["optimizer"] / 2 == model.numbers * each
        assert parts["DDP's buckets"] == (0 if gpu.shards else model.numbers * width)
        assert parts["NCCL"] == NCCL_GIB * GIB
    # Embeddings (tied to the head) and the last norm, one layer and the next: bf16 weights and gradients.
    shapes = [p.numel() for layer in model.module.model.layers for p in layer.parameters()]
    assert parts["gathered layers"] == (model.numbers - sum(shapes) + 2 * sum(shapes) / 2) * (2 + 2)
    assert model.layers == sum(shapes) * 2


def test_fsdp_2_accumulates_whole_gradients_unless_each_micro_batch_is_reduced(tmp_path: Path) -> None:
    for own, each in (({}, 2), ({"accelerator_config": SYNCED}, 4 / GPUS_OF_A_RUN)):
        model, parts = figures(tmp_path, FSDP2, use_peft=False, gradient_accumulation_steps=8, **own)
        assert parts["gradients"] == model.numbers * each


@pytest.mark.parametrize(
    ("own", "sharded"), [(ALL, True), (NF4, False), (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, True)]
)
def test_four_bits_are_sharded_if_they_are_stored_as_floats(tmp_path: Path, own: Any, sharded: bool) -> None:
    model, parts = figures(tmp_path, FSDP2, **own)
    assert parts["frozen weights"] == pytest.approx(model.whole + (model.frozen - model.whole) / GPUS_OF_A_RUN)
    assert (model.whole == 0) == sharded
    assert parts["trained weights"] == model.numbers * (2 if "load_in_4bit" in own else 4) / GPUS_OF_A_RUN


@pytest.mark.parametrize("own", [{"load_in_8bit": True}, EXPERTS])
def test_what_fsdp_2_does_not_shard_is_named(tmp_path: Path, own: Any) -> None:
    shape = "gpt-oss-20b" if "moe_quantize_experts" in own else "qwen3-0.6b"
    columns = forecast(arguments_of(tmp_path, shape, 2, bf16=True, **own), [DDP, FSDP2])["gpus"]
    assert [row["fits"] for row in columns.values()] == [True, False]
    assert "use DDP" in columns[FSDP2.title]["unknown"]


def test_a_run_that_fits_no_gpu_is_told_the_engine_the_steps_or_the_number_that_does(tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, "qwen3-0.6b", 2, use_peft=False, bf16=True, dtype="float32")
    arguments.training.gradient_accumulation_steps = 2
    model = model_of(arguments)
    one, eight = (sum(fixed_bytes(model, arguments, replace(FSDP2, processes=n)).values()) / GIB for n in (2, 8))
    tight = replace(DDP, gib=eight + 0.25)  # what a row needs, and less than whole gradients
    told = forecast(arguments, [replace(tight, gib=one + 0.25), replace(tight, processes=8, shards=True)])
    assert [row.get("change", "").partition(": rows")[0] for row in told["gpus"].values()] == [
        "accelerate_config: fsdp2", "gradient_accumulation_steps: 1",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "settings"),
    [("fsdp2 qwen3-0.6b full 2048", {"use_peft": False, "max_length": 2048}),
     ("fsdp2 qwen3-8b lora 4096", ALL | {"max_length": 4096})],
)  # fmt: skip
def test_fsdp_2_reserves_what_was_recorded_on_two_gpus(tmp_path: Path, row: str, settings: Any) -> None:
    arguments = arguments_of(tmp_path, row.split()[1], bf16=True, **settings)
    (found,) = forecast(arguments, [replace(FSDP2, processes=2)])["gpus"].values()
    recorded = [run["peak_gib"] for run in read() if (run.get("row"), run.get("side")) == (row, "fastpack")]
    assert recorded
    assert found["total_gib"] - CONTEXT_GIB - NCCL_GIB == pytest.approx(recorded[0], rel=0.15)
