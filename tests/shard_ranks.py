"""Models that torch's `fully_shard` has sharded over two ranks, for `test_ranks.py`: packed rows, whole steps beside
stock's, layers that stay gathered.

accelerate starts no FSDP on a CPU, so models are sharded here, in the units that accelerate makes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from ranks import leave
from static_material import make_inputs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trainer_material import build, make_dataset
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, PackedBatch, packed_attention
from fastpack_trl.model.sharded import keep_unsharded, layer_units, whole_bytes
from fastpack_trl.step.sync_free import SyncFreeStep
from fastpack_trl.testing import tiny_model

LENGTHS = (7, 1, 12)
IDS = torch.arange(24).view(1, 24)


def parted() -> nn.Module:
    model = tiny_model("qwen3")
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def backward(model: nn.Module, seed: int = 0) -> list[nn.Parameter]:
    ids = (IDS * 7 + seed + dist.get_rank()) % 60
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p for p in model.parameters() if p.grad is not None]


def gathered() -> None:
    """Weights stay whole from forward to backward, not longer; an exception parts them; gradients are the same."""
    expected = [_whole(p.grad) for p in backward(parted())]
    model = parted()
    layers = layer_units(model)
    assert layers == list(model.model.layers)
    assert whole_bytes(layers, 2) == 2 * sum(p.numel() for layer in layers for p in layer.parameters())

    def whole() -> list[bool]:
        return [not isinstance(p, DTensor) for layer in layers for p in layer.parameters()]

    backward(model)
    model.zero_grad()
    with keep_unsharded(layers):
        ids = (IDS * 7 + dist.get_rank()) % 60
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert all(whole())
        loss.backward()
        assert not any(whole())
    assert all(map(torch.equal, [_whole(p.grad) for p in model.parameters()], expected))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert not any(whole()), "outside of the context"
    with pytest.raises(ValueError, match="stopped"), keep_unsharded(layers):
        model(input_ids=ids, use_cache=False)
        raise ValueError("stopped")
    assert not any(whole())
    with keep_unsharded(layers):  # a batch that is replaced by a zero has no backward pass
        model(input_ids=ids, use_cache=False)
    assert not any(whole())


def packed() -> None:
    """Through FSDP's hooks, which rebuild every argument of a forward, documents stay apart and masks are made once."""
    ids = torch.randint(3, 90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(dist.get_rank()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (2,))
    for family, path, layers_too in (
        ("llama", "per_document", True), ("llama", "per_document", False), ("llama", "sdpa", True),
        ("gpt_oss", "per_document", True),
    ):  # fmt: skip
        model = tiny_model(family)
        for module in (*(model.model.layers if layers_too else ()), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        batch = PackedBatch.from_lengths(LENGTHS)
        with packed_attention(model, path, compute_dtype=torch.bfloat16):
            logits = model(input_ids=ids, position_ids=batch.position_ids, packed_batch=batch, use_cache=False).logits
            logits.float().square().mean().backward()
        norms = [parameter.grad.to_local().norm() for parameter in model.parameters()]
        assert all(torch.isfinite(norm) for norm in norms)
        assert sum(norms) > 0
        assert batch.build_counts
        assert set(batch.build_counts.values()) == {1}, batch.build_counts
        batch.clear_derived()
        assert not batch.derived.values
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
        expected = torch.cat(alone, dim=1)
        assert logits.dtype == torch.bfloat16
        budget = 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())
        torch.testing.assert_close(logits, expected, rtol=0, atol=budget)


def whole_steps() -> None:
    """Attention, loss, metrics and LoRA of ours: whole optimizer steps have the loss and the gradients of stock."""
    for family, lora, low, tied in (
        ("llama", False, False, False), ("llama", False, False, True), ("llama", True, False, False),
        ("qwen3_moe", False, False, False), ("qwen3", False, True, False), ("llama", True, True, False),
    ):  # fmt: skip
        ours, stock = (_figures(cls, family, lora, low, tied) for cls in (FastSFTTrainer, SFTTrainer))
        assert torch.isfinite(stock).all()
        if low:
            # FSDP casts the sum of the losses to `output_dtype` here, each of them in stock: two steps of bf16, and in
            # the first optimizer step alone, since Adam divides what is rounded by itself.
            torch.testing.assert_close(ours[:3], stock[:3], rtol=2**-6, atol=0)
        else:
            torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)


def _as_accelerate(model: Any, base: Any, low: bool, tied: bool) -> None:
    """Shard each layer, the embedding, the last norm with the head, and what is left."""
    mesh = init_device_mesh("cpu", (2,))
    dtypes = {"param_dtype": torch.bfloat16, "cast_forward_inputs": True, "output_dtype": torch.bfloat16}
    policy = MixedPrecisionPolicy(**dtypes if low else {})
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    for unit in (*base.model.layers, *([] if tied else [embedding])):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    tail = [base.model.norm, *([embedding] if tied else []), head]
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _figures(cls: type[SFTTrainer], family: str, lora: bool, low: bool, tied: bool) -> Tensor:
    """Of three optimizer steps of two micro-batches: losses, gradient norms, then two evaluation losses."""
    ours = cls is FastSFTTrainer
    torch.manual_seed(0)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = build(
        cls, Path(sys.argv[1]), model=tiny_model(family, tie_word_embeddings=tied), data=make_dataset("tokens", 12),
        fast={"verify_packing": "off"} if ours else None, trainer={"peft_config": adapters} if lora else {},
        packing=True, gradient_accumulation_steps=2, average_tokens_across_devices=False,
    )  # fmt: skip
    model, found = trainer.model.train(), []
    optimizer: Any = None
    trainer.current_gradient_accumulation_steps = 2

    def loss_of(seed: int, items: Any) -> Tensor:
        inputs = dict(make_inputs([7, 5, 9], seed=10 * seed + dist.get_rank(), ignored=0.3))
        if not ours:
            inputs = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
        loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def train(steps: Iterable[int]) -> None:
        """A run of the trainer; the second one begins with DTensors."""
        nonlocal optimizer
        with trainer._fastpack_features(announce=True) if ours else contextlib.nullcontext():
            if optimizer is None:
                _as_accelerate(model, model.get_base_model() if lora else model, low, tied)
                optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            trained = optimizer.param_groups[0]["params"]
            for step in steps:
                for micro in range(2):
                    loss = loss_of(2 * step + micro, torch.tensor(30))
                    loss.backward()
                    found.append(float(loss))
                found.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0).full_tensor()))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found.extend(float(loss_of(seed, None)) for seed in (50, 60))
            model.train()
            if ours:
                assert trainer.fastpack_run.get_state(SyncFreeStep).loss, trainer.fastpack_report["sync_free"]

        # Known when the run has ended: layers that were PEFT's in any call are counted there.
        assert not (ours and lora) or trainer.fastpack_report["lora"].path == "fast", trainer.fastpack_report["lora"]

    train((0, 1))
    train((2,))
    return torch.tensor(found)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in (packed, whole_steps, gathered):
        case()
    leave()
