"""What a sharded model holds and frees, by modules with the two methods that FSDP 2 gives to its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastpack_trl.model.sharded import fsdp_modules, gathered_bytes, reshard_all


def sharded(numbers: int, *inside: nn.Module, trained: bool = True, layer: bool = False) -> Any:
    """A module of `numbers` parameters, frozen or not, that counts how often it is sharded again."""
    module: Any = nn.Linear(numbers, 1, bias=False).requires_grad_(trained)
    module.freed, module.inside, module.unshard = 0, nn.ModuleList(inside), None
    module.reshard = lambda: setattr(module, "freed", module.freed + 1)
    if layer:
        module.gradient_checkpointing = False
    return module


def test_two_layers_and_all_others_are_gathered_with_fp32_gradients_and_freed_together() -> None:
    layers = [sharded(10, trained=False, layer=True), sharded(30, layer=True), sharded(20, sharded(5), layer=True)]
    model = sharded(100, *layers, nn.Linear(7, 1, bias=False))
    assert fsdp_modules(model) == [model, *layers, *layers[2].inside]
    assert gathered_bytes(model, itemsize=2) == (107 + 5) * (2 + 4) + 2 * 30 * (2 + 4)
    assert [gathered_bytes(one, itemsize=2) for one in (layers[0], sharded(9))] == [2 * 10 * 2, 9 * (2 + 4)]
    reshard_all(model)
    assert [module.freed for module in fsdp_modules(model)] == [1] * 5
