"""Models that torch's `fully_shard` has sharded over two ranks, for `test_ranks.py`: packed rows, layers that stay
gathered.

accelerate starts no FSDP on a CPU, so models are sharded here, in the units that accelerate makes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import leave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fastpack_trl import PackedBatch, packed_attention
from fastpack_trl.model.sharded import keep_unsharded, layer_units, whole_bytes
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


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in (packed, gathered):
        case()
    leave()
