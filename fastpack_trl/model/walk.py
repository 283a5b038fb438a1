"""Modules and parameters of a model as lists: torch's generators, one in the other, take three times as long."""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module, outside: type | tuple[()] = ()) -> list[nn.Module]:
    """Return `model` and the modules inside, each once, as ``modules()`` does; none inside of a class."""
    found, waiting = dict[nn.Module, None](), list[nn.Module | None]([model])
    while waiting:
        if (module := waiting.pop()) is not None and module not in found:
            found[module] = None
            if not (outside and isinstance(module, outside)):
                waiting += reversed(module.__dict__["_modules"].values())
    return list(found)


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `model`, each once, in the order of ``parameters()``."""
    every = (each for module in modules_of(model) for each in module.__dict__["_parameters"].values())
    return list(dict.fromkeys(each for each in every if each is not None))
