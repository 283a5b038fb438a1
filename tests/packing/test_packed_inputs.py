"""`PackedInputs`: tensors and metadata move together, each tensor once, and an edit before a copy counts after it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from collator_material import ROWS, assert_same_inputs, tensors_of
from counted_operators import Counted
from datasets import Dataset
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from torch.utils.data import DataLoader

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_inputs import PackedInputs

COLLATOR = PackingCollator(pad_token_id=0)
ALIKE = [*ROWS, *({"input_ids": [*range(20), token]} for token in (7, 8))]
COPIES = {
    "pickle": lambda inputs: pickle.loads(pickle.dumps(inputs)), "deepcopy": copy.deepcopy, "copy": copy.copy,
    "to": lambda inputs: inputs.to("cpu"), "pin": lambda inputs: inputs._map(torch.clone, lambda value: value),
    "plain dict": lambda inputs: copy.deepcopy(dict(inputs)),
    "as Trainer prepares": lambda inputs: type(inputs)(dict(inputs)),
    "as DDP moves": lambda inputs: _to_kwargs((), inputs, torch.device("cpu"), False)[1][0],
    "as FSDP casts": lambda inputs: _apply_to_tensors(lambda tensor: tensor, inputs),
    "twice": lambda inputs: copy.deepcopy(pickle.loads(pickle.dumps(inputs))).to("cpu"),
}  # fmt: skip
"""Pinning needs a device: a clone of each tensor is what it does."""


def distinct(inputs: Any) -> int:
    return len({id(tensor) for tensor in tensors_of(inputs).values()})


def is_counted(inputs: Any) -> tuple[bool, bool]:
    """Whether the metadata belong to labels and positions, as they are."""
    batch = inputs["packed_batch"]
    return batch.counts(inputs["labels"]), batch.describes(inputs["input_ids"], inputs["position_ids"])


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("edited", [None, "labels", "position_ids"])
def test_copies_are_equal_and_keep_shared_tensors_changes_and_edits(copied: str, edited: str | None) -> None:
    inputs = PackingCollator(pad_token_id=0, pad_to_multiple_of=16, share_prefixes=edited is None)(ALIKE)
    assert (inputs["packed_batch"].shared is None) == (edited is not None)
    inputs["use_cache"] = False
    inputs["packed_batch"].derive("mask", lambda: torch.ones(3))
    if edited:
        inputs[edited][0, 1] = 4
    twin = COPIES[copied](inputs)
    assert_same_inputs(twin, inputs)
    assert twin["packed_batch"].seq_idx is twin["seq_idx"]
    assert twin["packed_batch"].position_ids is twin["position_ids"]
    assert is_counted(twin) == is_counted(inputs) == (edited != "labels", edited != "position_ids")
    twin["seq_idx"].fill_(0)
    assert is_counted(twin) == is_counted(inputs), "no edit of labels or positions"
    twin["labels"][0, 3:5] = -100
    twin["position_ids"].add_(1)
    assert is_counted(twin) == is_counted(COPIES[copied](twin)) == (False, False)


def test_each_tensor_is_copied_once_and_none_to_the_device_where_it_is() -> None:
    inputs, extra = PackingCollator(pad_token_id=0, share_prefixes=True)(ALIKE), torch.ones(2)
    inputs["nested"] = {"extra": extra}
    with Counted(lambda name, _: "copy" in name or name == "clone") as copies:
        there = inputs.to("meta")
    assert copies.count == distinct(inputs) + 1
    assert {tensor.device.type for tensor in tensors_of(there).values()} == {"meta"}
    assert there["nested"]["extra"].device.type == "meta"
    assert is_counted(there) == (True, True)
    with Counted(lambda name, _: "copy" in name or name == "clone") as copies:
        here = inputs.to("cpu")
    assert not copies.count
    assert all(here[name] is inputs[name] for name in ("input_ids", "labels", "seq_idx"))
    one_by_one = {name: value.to("meta") if hasattr(value, "is_meta") else value for name, value in inputs.items()}
    assert PackedInputs(one_by_one)["packed_batch"].device.type == "meta", "metadata follow"
    assert inputs["packed_batch"].device.type == "cpu"


def numpy_dataset() -> Dataset:
    rng = np.random.default_rng(1)
    rows = [{"input_ids": rng.integers(0, 95, 12).tolist(), "seq_lengths": [5, 7]} for _ in range(6)]
    return Dataset.from_list(rows).with_format("numpy")


def assert_batches_of(dataset: Dataset, batches: list[Any]) -> None:
    assert len(batches) == 3
    for index, inputs in enumerate(batches):
        assert type(inputs) is PackedInputs
        assert is_counted(inputs) == (True, True)
        assert_same_inputs(inputs, COLLATOR(dataset.__getitems__([2 * index, 2 * index + 1])))


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_batches_of_workers_arrive_as_they_were_made(method: str, workers: int) -> None:
    dataset = numpy_dataset()
    loader = DataLoader(dataset, 2, collate_fn=COLLATOR, num_workers=workers, multiprocessing_context=method)
    assert_batches_of(dataset, list(loader))


def test_accelerate_places_a_batch_with_its_metadata() -> None:
    dataset, device = numpy_dataset(), torch.device("cpu")
    loader = prepare_data_loader(DataLoader(dataset, 2, collate_fn=COLLATOR), device=device, put_on_device=True)
    assert_batches_of(dataset, list(loader))
    loader.device = torch.device("meta")
    for inputs in loader:
        assert {tensor.device.type for tensor in tensors_of(inputs).values()} == {"meta"}
        assert is_counted(inputs) == (True, True)


@pytest.mark.cuda
def test_on_cuda_pinned_tensors_are_copied_asynchronously() -> None:
    from torch.profiler import ProfilerActivity, profile

    loader = DataLoader(numpy_dataset(), 2, collate_fn=COLLATOR, num_workers=2, pin_memory=True)
    for index, inputs in enumerate(loader):
        assert type(inputs) is PackedInputs
        assert all(tensor.is_pinned() for tensor in tensors_of(inputs).values())
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            there = inputs.to("cuda")
            torch.cuda.synchronize()
        names = [event.name for event in trace.events() if "Memcpy HtoD" in event.name]
        assert len(names) == distinct(inputs)
        assert all("Pinned" in name for name in names)
        assert not [event for event in trace.events() if "StreamSynchronize" in event.name]
        assert is_counted(there) == (True, True)
        assert_same_inputs(there.to("cpu"), COLLATOR(numpy_dataset().__getitems__([2 * index, 2 * index + 1])))
