"""What a sharded model holds and frees, by modules with the two methods that FSDP 2 gives to its own."""

from __future__ import annotations

from torch import nn

from fastpack_trl.model.sharded import fsdp_modules, gathered_bytes, reshard_all


class Sharded(nn.Module):
    """A module of `numbers` parameters, frozen or not, that counts how often it is sharded again."""

    def __init__(self, numbers: int, *inside: nn.Module, trained: bool = True) -> None:
        super().__init__()
        self.freed, self.inside = 0, nn.ModuleList(inside)
        self.own = nn.Linear(numbers, 1, bias=False).requires_grad_(trained)

    def reshard(self) -> None:
        self.freed += 1

    def unshard(self) -> None:
        raise AssertionError


class Layer(Sharded):
    gradient_checkpointing = False


def test_two_layers_and_all_others_are_gathered_with_fp32_gradients_and_freed_together() -> None:
    layers = [Layer(10, trained=False), Layer(30), Layer(20, Sharded(5))]
    model = Sharded(100, *layers, nn.Linear(7, 1, bias=False))
    assert fsdp_modules(model) == [model, *layers, *layers[2].inside]
    assert gathered_bytes(model, itemsize=2) == (107 + 5) * (2 + 4) + 2 * 30 * (2 + 4)
    assert gathered_bytes(layers[0], itemsize=2) == 2 * 10 * 2
    reshard_all(model)
    assert [module.freed for module in fsdp_modules(model)] == [1] * 5
