"""`PackedInputs`: one block, one copy, also through data loaders, accelerate and the trainer."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from collator_material import ROWS, CountCopies, assert_same_inputs, batches, storages_of, tensors_of
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_inputs import ALIGNMENT, PackedInputs

COLLATOR = PackingCollator(pad_token_id=0)


def moved(inputs, device="meta"):
    """The inputs on a device, and how many copies that took."""
    with CountCopies() as count:
        there = inputs.to(device)
    assert type(there) is PackedInputs
    assert list(there) == list(inputs)
    return there, sum(count.copies.values())


def through_pickle(inputs):
    return pickle.loads(pickle.dumps(inputs))


@settings(max_examples=40, deadline=None)
@given(rows=batches(), multiple=st.sampled_from([None, 16]))
def test_all_tensors_are_disjoint_aligned_views_of_one_buffer(rows, multiple):
    inputs = PackingCollator(pad_token_id=0, pad_to_multiple_of=multiple)(rows)
    assert next(iter(inputs)) == "input_ids"
    assert len(storages_of(inputs)) == 1
    spans = []
    for tensor in {id(tensor): tensor for tensor in tensors_of(inputs).values()}.values():
        start = tensor.storage_offset() * tensor.element_size()
        assert start % ALIGNMENT == 0
        assert tensor.is_contiguous()
        spans.append((start, start + tensor.nbytes))
    assert all(end + ALIGNMENT <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_one_copy_to_another_device_and_none_to_the_same():
    inputs = COLLATOR(ROWS)
    there, copies = moved(inputs)
    assert copies == len(storages_of(there)) == 1
    assert {tensor.device.type for tensor in tensors_of(there).values()} == {"meta"}
    assert there["packed_batch"].position_ids is there["position_ids"]
    assert there["packed_batch"].seq_lengths == inputs["packed_batch"].seq_lengths
    here, copies = moved(inputs, "cpu")
    assert copies == 0
    assert all(here[name] is value for name, value in inputs.items())
    one_by_one = {name: value.to("meta") if hasattr(value, "is_meta") else value for name, value in inputs.items()}
    assert PackedInputs(one_by_one)["packed_batch"].device.type == "meta", "metadata follow"
    assert inputs["packed_batch"].device.type == "cpu"


def test_a_changed_mapping_is_copied_as_it_is():
    inputs, extra = COLLATOR(ROWS), torch.ones(2)
    inputs |= {"use_cache": False, "nested": {"extra": extra}, "position_ids": torch.zeros(1, 4, dtype=torch.int64)}
    inputs["shift_labels"] = inputs.pop("labels")
    del inputs["seq_idx"]
    there, copies = moved(inputs)
    assert copies == 3  # the block, the nested tensor, the replaced one
    assert there["use_cache"] is False
    assert there["nested"]["extra"].device.type == "meta"
    assert there["position_ids"].shape == (1, 4)
    assert there["shift_labels"].shape == (1, 8)
    assert inputs["nested"]["extra"] is extra
    for rest in (PackedInputs(a=extra), PackedInputs(), PackedInputs(nested={"extra": extra})):
        assert moved(rest)[1] == len(rest)
    for name in set(inputs) - {"nested"}:
        del inputs[name]
    assert moved(inputs)[1] == 1, "nothing of the block is left: it is not copied"


@pytest.mark.parametrize("copied", [through_pickle, copy.deepcopy])
def test_copies_are_equal_in_one_storage_of_their_own_and_keep_changes(copied):
    inputs = PackingCollator(pad_token_id=0, pad_to_multiple_of=16)(ROWS)
    inputs["packed_batch"].derive("mask", lambda: torch.ones(3))
    twin = copied(inputs)
    assert_same_inputs(twin, inputs)
    assert len(storages_of(twin)) == 1
    assert not storages_of(twin) & storages_of(inputs)
    assert twin["packed_batch"].seq_idx is twin["seq_idx"]
    assert twin["packed_batch"].build_counts == {}

    shallow = copy.copy(inputs)
    assert type(shallow) is type(twin) is PackedInputs
    assert all(shallow[name] is value for name, value in inputs.items())
    shallow["use_cache"] = shallow.pop("labels")
    shallow["input_ids"] = torch.tensor([[1]])
    assert "labels" in inputs
    twin = copied(shallow)
    assert_same_inputs(twin, shallow)
    assert moved(twin)[1] == 2
    assert_same_inputs(copied(PackedInputs(a=torch.ones(1))), {"a": torch.ones(1)})


def test_compiled_code_is_not_compiled_again_for_other_lengths():
    # An offset that equals the length of another tensor would be guarded on, and holds for multiples of 16 only.
    torch._dynamo.reset()
    graphs = []

    @torch.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=True)
    def read(ids, labels, positions, seq_idx):
        return ids + labels + positions + seq_idx

    for total in (64, 128, 47, 512, 1001):
        inputs = COLLATOR([{"input_ids": np.arange(total)}])
        read(*(inputs[name] for name in ("input_ids", "labels", "position_ids", "seq_idx")))
    assert len(graphs) == 1


def numpy_dataset():
    rng = np.random.default_rng(1)
    rows = [{"input_ids": rng.integers(0, 95, 12).tolist(), "seq_lengths": [5, 7]} for _ in range(6)]
    return Dataset.from_list(rows).with_format("numpy")


def assert_batches_of(dataset, batches):
    assert len(batches) == 3
    for index, inputs in enumerate(batches):
        assert type(inputs) is PackedInputs
        assert len(storages_of(inputs)) == 1
        assert moved(inputs)[1] == 1
        assert_same_inputs(inputs, COLLATOR(dataset.__getitems__([2 * index, 2 * index + 1])))


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_batches_of_workers_arrive_in_one_storage(method, workers):
    dataset = numpy_dataset()
    loader = DataLoader(dataset, 2, collate_fn=COLLATOR, num_workers=workers, multiprocessing_context=method)
    assert_batches_of(dataset, list(loader))


def test_accelerate_places_a_batch_with_one_copy():
    dataset, device = numpy_dataset(), torch.device("cpu")
    loader = prepare_data_loader(DataLoader(dataset, 2, collate_fn=COLLATOR), device=device, put_on_device=True)
    assert_batches_of(dataset, list(loader))
    loader.device = torch.device("meta")
    with CountCopies() as count:
        batches = list(loader)
    assert sum(count.copies.values()) == len(batches) == 3
    assert all(tensor.device.type == "meta" for inputs in batches for tensor in tensors_of(inputs).values())


@pytest.mark.cuda
def test_on_cuda_a_pinned_block_is_one_asynchronous_copy():
    from torch.profiler import ProfilerActivity, profile

    loader = DataLoader(numpy_dataset(), 2, collate_fn=COLLATOR, num_workers=2, pin_memory=True)
    for index, inputs in enumerate(loader):
        assert type(inputs) is PackedInputs
        assert len(storages_of(inputs)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(inputs).values())
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            there = inputs.to("cuda")
            torch.cuda.synchronize()
        (name,) = [event.name for event in trace.events() if "Memcpy HtoD" in event.name]
        assert "Pinned" in name
        assert not [event for event in trace.events() if "StreamSynchronize" in event.name]
        reference = COLLATOR(numpy_dataset().__getitems__([2 * index, 2 * index + 1]))
        assert_same_inputs(there.to("cpu"), reference)
