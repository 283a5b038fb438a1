"""Steps over local tensors, and layers that stay gathered, on two ranks, for `test_local_shards.py`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import leave
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fastpack_trl.model.patches import attribute_set
from fastpack_trl.model.sharded import layer_units, stay_gathered, whole_bytes
from fastpack_trl.step.local_shards import clip, local_steps, why_stock_step
from fastpack_trl.testing import tiny_model

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


def clipped() -> None:
    """The norm and the gradients are those of torch over DTensors, clipped or not."""
    for most in (1e-2, 1e6):
        found: list[tuple[Tensor, list[Tensor]]] = []
        for function in (torch.nn.utils.clip_grad_norm_, clip):
            parameters = backward(parted())
            norm = function(parameters, most)
            assert norm is not None
            found.append(
                (norm.full_tensor() if isinstance(norm, DTensor) else norm, [_whole(p.grad) for p in parameters])
            )
        (expected, theirs), (norm, ours) = found
        # The norm is added up in another order, which shows in its last bits; what is not clipped has no factor.
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-6 if float(norm) > most else 0, atol=0)
    parameters = backward(parted())
    parameters[0].grad = _whole(parameters[0].grad)
    assert clip(parameters, 1.0) is None


def stepped() -> None:
    """Weights and state are those of torch's own steps; a hook on the optimizer sees the model's parameters."""
    for options in ({"fused": True}, {"foreach": True}):
        states = []
        for ours in (False, True):
            model = parted()
            decayed = [p for p in model.parameters() if p.dim() > 1]
            groups = [
                {"params": decayed, "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() == 1]},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, **options)
            # The first makes the state.
            assert _steps(model, optimizer, ours, 3) == [True, not ours, not ours]
            if ours:
                assert "step" not in vars(optimizer)
                with local_steps(optimizer):
                    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
            states.append([_whole(value) for p in model.parameters() for value in (p, *optimizer.state[p].values())])
            assert all(isinstance(optimizer.state[p]["exp_avg"], DTensor) for p in decayed)
        assert len(states[0]) == len(states[1])
        assert all(map(torch.equal, *states)), options
    seen: list[bool] = []
    model = parted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer.register_step_pre_hook(lambda own, *_: seen.append(isinstance(own.param_groups[0]["params"][0], DTensor)))
    assert _steps(model, optimizer, True, 2) == seen == [True, True]
    assert "neither fused nor foreach" in why_stock_step(torch.optim.AdamW(model.parameters()))
    stock = optimizer.step
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    assert why_stock_step(optimizer) == ""
    optimizer.step = lambda closure=None: stock(closure)  # type: ignore[method-assign]
    assert why_stock_step(optimizer) == "the step of AdamW was replaced: it may look at DTensors"
    assert "Adafactor steps" in why_stock_step(torch.optim.Adafactor(model.parameters()))


def _steps(model: nn.Module, optimizer: Any, ours: bool, count: int) -> list[bool]:
    """Return for each step whether it ran over DTensors."""
    parted: list[bool] = []
    read = type(optimizer)._init_group

    def init_group(own: Any, group: dict[str, Any], *lists: Any) -> Any:
        parted.append(isinstance(group["params"][0], DTensor))
        return read(own, group, *lists)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_set(type(optimizer), "_init_group", init_group))
        if ours:
            stack.enter_context(local_steps(optimizer))
        for seed in range(count):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
    return parted[:: len(optimizer.param_groups)]


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
    with stay_gathered(layers):
        ids = (IDS * 7 + dist.get_rank()) % 60
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert all(whole())
        loss.backward()
        assert not any(whole())
    assert all(map(torch.equal, [_whole(p.grad) for p in model.parameters()], expected))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    assert not any(whole()), "outside of the context"
    with pytest.raises(ValueError, match="stopped"), stay_gathered(layers):
        model(input_ids=ids, use_cache=False)
        raise ValueError("stopped")
    assert not any(whole())
    with stay_gathered(layers):  # a batch that is replaced by a zero has no backward pass
        model(input_ids=ids, use_cache=False)
    assert not any(whole())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in (clipped, stepped, gathered):
        case()
    leave()
