"""Properties of `PackedInputs`: one block, one copy, and the way through data loaders, accelerate and the trainer."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from collator_material import ROWS, CountCopies, assert_same_inputs, batches, storages_of, tensors_of
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from trainer_material import make_dataset, make_tokenizer
from trainer_material import settings as arguments
from trl import SFTConfig, SFTTrainer

from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_inputs import ALIGNMENT, PackedInputs
from fastpack_trl.testing import tiny_model

# --- one block, one copy ---


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
    spans.sort()
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_to_another_device_is_one_copy_and_to_the_same_device_is_none():
    inputs = PackingCollator(pad_token_id=0)(ROWS)
    with CountCopies() as count:
        there = inputs.to("meta")
    assert sum(count.copies.values()) == 1
    assert type(there) is PackedInputs
    assert list(there) == list(inputs)
    assert {tensor.device.type for tensor in tensors_of(there).values()} == {"meta"}
    assert len(storages_of(there)) == 1
    assert there["packed_batch"].position_ids is there["position_ids"]
    assert there["packed_batch"].seq_lengths == inputs["packed_batch"].seq_lengths

    with CountCopies() as count:
        here = inputs.to("cpu", non_blocking=True)
    assert not count.copies
    assert all(here[name] is value for name, value in inputs.items())


def test_a_changed_mapping_is_copied_as_it_is():
    inputs = PackingCollator(pad_token_id=0)(ROWS)
    extra = torch.ones(2)
    inputs["use_cache"] = False
    inputs["nested"] = {"extra": extra}
    inputs["position_ids"] = torch.zeros(1, 4, dtype=torch.int64)
    inputs["shift_labels"] = inputs.pop("labels")
    del inputs["seq_idx"]
    with CountCopies() as count:
        there = inputs.to("meta")
    assert sum(count.copies.values()) == 3  # the block, the nested tensor, the replaced one
    assert list(there) == list(inputs)
    assert there["use_cache"] is False
    assert there["nested"]["extra"].device.type == "meta"
    assert there["position_ids"].shape == (1, 4)
    assert there["shift_labels"].shape == (1, 8)
    assert inputs["nested"]["extra"] is extra

    for left in (PackedInputs({"a": extra}), PackedInputs(), inputs):
        for name in [name for name in left if name not in ("a", "nested")]:
            del left[name]
        with CountCopies() as count:
            there = left.to("meta")
        assert sum(count.copies.values()) == len(left)  # nothing of the block is left: it is not copied
        assert list(there) == list(left)


def through_pickle(inputs):
    return pickle.loads(pickle.dumps(inputs))


@pytest.mark.parametrize("copied", [through_pickle, copy.deepcopy])
def test_copies_are_equal_in_one_storage_of_their_own_and_keep_changes(copied):
    inputs = PackingCollator(pad_token_id=0, pad_to_multiple_of=16)(ROWS)
    inputs["packed_batch"].derive("mask", lambda: torch.ones(3))
    twin = copied(inputs)
    assert type(twin) is PackedInputs
    assert_same_inputs(twin, inputs)
    assert len(storages_of(twin)) == 1
    assert not storages_of(twin) & storages_of(inputs)
    assert twin["packed_batch"].seq_idx is twin["seq_idx"]
    assert twin["packed_batch"].build_counts == {}

    shallow = copy.copy(inputs)
    assert type(shallow) is PackedInputs
    assert all(shallow[name] is value for name, value in inputs.items())
    shallow["use_cache"] = shallow.pop("labels")
    shallow["input_ids"] = torch.tensor([[1]])
    assert "labels" in inputs
    inputs, twin = shallow, copied(shallow)
    assert_same_inputs(twin, inputs)
    with CountCopies() as count:
        twin.to("meta")
    assert sum(count.copies.values()) == 2
    assert_same_inputs(copied(PackedInputs(a=torch.ones(1))), {"a": torch.ones(1)})


def test_compiled_code_is_not_compiled_again_for_other_lengths():
    # An offset that equals the length of another tensor would be guarded on, and holds for multiples of 16 only.
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=True)
    def read(ids, labels, positions, seq_idx):
        return ids + labels + positions + seq_idx

    for total in (64, 128, 47, 512, 1001):
        inputs = PackingCollator(pad_token_id=0)([{"input_ids": np.arange(total)}])
        read(*(inputs[name] for name in ("input_ids", "labels", "position_ids", "seq_idx")))
    assert len(graphs) == 1


# --- through the libraries ---


def numpy_dataset():
    rng = np.random.default_rng(1)
    rows = [{"input_ids": rng.integers(0, 95, 12).tolist(), "seq_lengths": [5, 7]} for _ in range(6)]
    return Dataset.from_list(rows).with_format("numpy")


def assert_batches_of(dataset, collator, batches):
    assert len(batches) == 3
    for index, inputs in enumerate(batches):
        assert type(inputs) is PackedInputs
        assert_same_inputs(inputs, collator(dataset.__getitems__([2 * index, 2 * index + 1])))


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.slow)])
def test_batches_of_workers_arrive_in_one_storage(method, workers):
    dataset, collator = numpy_dataset(), PackingCollator(pad_token_id=0)
    loader = DataLoader(dataset, 2, collate_fn=collator, num_workers=workers, multiprocessing_context=method)
    batches = list(loader)
    assert_batches_of(dataset, collator, batches)
    for inputs in batches:
        assert len(storages_of(inputs)) == 1
        with CountCopies() as count:
            inputs.to("meta")
        assert sum(count.copies.values()) == 1


def test_accelerate_places_a_batch_with_one_copy():
    dataset, collator = numpy_dataset(), PackingCollator(pad_token_id=0)
    loader = prepare_data_loader(
        DataLoader(dataset, 2, collate_fn=collator), device=torch.device("cpu"), put_on_device=True
    )
    assert isinstance(loader, DataLoaderShard)
    assert_batches_of(dataset, collator, list(loader))
    loader.device = torch.device("meta")
    with CountCopies() as count:
        batches = list(loader)
    assert sum(count.copies.values()) == len(batches) == 3
    assert all(tensor.device.type == "meta" for inputs in batches for tensor in tensors_of(inputs).values())


def test_metadata_follows_where_tensors_are_moved_one_by_one():
    inputs = PackingCollator(pad_token_id=0)(ROWS)
    moved = PackedInputs(
        {name: value.to("meta") if hasattr(value, "device") else value for name, value in inputs.items()}
    )
    assert moved["packed_batch"].device.type == "meta"
    assert inputs["packed_batch"].device.type == "cpu"


@pytest.mark.parametrize("workers", [0, 2])
def test_sft_trainer_has_the_same_losses_with_our_collator(tmp_path, workers):
    def losses(ours):
        torch.manual_seed(0)
        trainer = SFTTrainer(
            tiny_model("qwen3"),
            SFTConfig(
                **arguments(
                    tmp_path, max_steps=3, per_device_train_batch_size=2, packing=True, dataloader_num_workers=workers,
                    gradient_accumulation_steps=2, gradient_checkpointing=False, eval_steps=3,
                )
            ),
            train_dataset=make_dataset("tokens", 40),
            eval_dataset=make_dataset("tokens", 8),
            processing_class=make_tokenizer(),
        )  # fmt: skip
        if ours:
            trainer.train_dataset = trainer.train_dataset.with_format("numpy")
            trainer.data_collator = PackingCollator(pad_token_id=0, vocab_size=96)
            prepared = trainer._prepare_inputs(trainer.data_collator(trainer.train_dataset.__getitems__([0])))
            assert len(storages_of(prepared)) == 1  # on the device already: the same tensors
        trainer.train()
        names = ("loss", "eval_loss", "grad_norm", "mean_token_accuracy", "num_tokens")
        return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]

    stock, mine = losses(ours=False), losses(ours=True)
    assert sum("loss" in log for log in stock) == 3
    assert sum("eval_loss" in log for log in stock) == 1
    assert mine == stock


# --- on a device ---


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_block_is_one_asynchronous_copy():
    from torch.profiler import ProfilerActivity, profile

    collator = PackingCollator(pad_token_id=0)
    loader = DataLoader(numpy_dataset(), 2, collate_fn=collator, num_workers=2, pin_memory=True)
    for index, inputs in enumerate(loader):
        assert type(inputs) is PackedInputs
        assert len(storages_of(inputs)) == 1
        assert all(tensor.is_pinned() for tensor in tensors_of(inputs).values())
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            there = inputs.to("cuda")
            torch.cuda.synchronize()
        copies = [event for event in trace.events() if "Memcpy HtoD" in event.name]
        assert len(copies) == 1
        assert "Pinned" in copies[0].name
        assert not [event for event in trace.events() if "StreamSynchronize" in event.name]
        reference = collator(numpy_dataset().__getitems__([2 * index, 2 * index + 1]))
        assert_same_inputs(there.to("cpu"), reference)
