"""Host work that need not be done in each micro-batch: walks over modules, the filter of the loss."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import Trainer
from transformers.utils import is_torch_xla_available
from trl import SFTTrainer

from fastpack_trl.model.changes import patch_attribute

_training = itemgetter("training")


class ModelContents:
    """Modules and parameters of a model, listed again after others were put into one of its modules.

    Not detected: removals, and writes that bypass registration (``module._parameters[name] = ...``).

    Attributes:
        version: grows with each list but the first.
        modules: modules in the order of ``model.modules()``.
        parameters: parameters in the order of ``model.parameters()``.
    """

    def __init__(self) -> None:
        self.version = 0
        self.clear()

    def clear(self) -> None:
        """Hold no model."""
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self._model: nn.Module | None = None
        self._held: set[int] = set()
        self._lists: list[tuple[nn.ModuleList, int]] = []
        self._is_stale = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice registrations until the context ends; afterwards hold no model."""

        def registered(module: nn.Module, *_: Any) -> None:
            if id(module) in self._held:  # a forward pass makes lists of its own: ``self.layers[:n]``
                self._is_stale = True

        with contextlib.ExitStack() as stack:
            stack.callback(self.clear)
            for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
                stack.callback(register(registered).remove)
            yield

    def refresh(self, model: nn.Module) -> int:
        """List `model` if it is another one or has changed; return the version."""
        # `ModuleList.insert` writes past registration.
        if model is self._model and not self._is_stale and all(len(held) == size for held, size in self._lists):
            return self.version
        modules, parameters = list(model.modules()), list(model.parameters())
        # PEFT's parametrizations of experts come and go in each forward pass: all is as before when it ends.
        if list(map(id, modules + parameters)) != list(map(id, self.modules + self.parameters)):
            self.version += self._model is not None
            self.modules, self.parameters = modules, parameters
        self._model, self._is_stale = model, False
        self._held = set(map(id, self.modules))
        self._lists = [(module, len(module)) for module in self.modules if type(module) is nn.ModuleList]
        return self.version


class HostWork:
    """Lists of modules and parameters that replace TRL's walks over the model in each step, while it is `active`."""

    def __init__(self) -> None:
        self.contents, self.active = ModelContents(), False
        self._per_token: int | None = None
        self._modes: list[dict[str, Any]] = []
        self._version: int | None = None

    @contextlib.contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:
        """Replace the walks over ``trainer.model`` until the context ends."""
        self._per_token, self._version, model = None, None, trainer.model
        # A deep copy of the model has these methods too: they must not keep the run alive, and leave the copy alone.
        owner, ours, run = weakref.ref(model), weakref.ref(self), weakref.ref(trainer)

        def train(self: nn.Module, mode: bool = True) -> nn.Module:
            host = ours() if self is owner() else None
            return self if host is not None and mode and host._all_train(self) else type(self).train(self, mode)

        def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
            host = ours() if self is owner() and set_to_none else None
            listed = host and host.with_gradients(self, getattr(run(), "optimizer", None))
            if listed is None:
                type(self).zero_grad(self, set_to_none)
            for parameter in listed or ():
                parameter.grad = None

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.contents.watched())
            plain = type(model).zero_grad is nn.Module.zero_grad
            for method in (train, zero_grad) if plain else (train,):
                if method.__name__ not in vars(model):  # a replaced one stays
                    stack.enter_context(patch_attribute(model, method.__name__, types.MethodType(method, model)))
            stack.enter_context(patch_attribute(self, "active", True))
            yield

    def _all_train(self, model: nn.Module) -> bool:
        """Return whether ``model.train()`` would change nothing: it ran on the present modules, and none left the mode.

        It writes the mode of each module through ``__setattr__``: 18 ms for the 2,400 modules of Qwen3-0.6B with LoRA.
        """
        if self._version != self.contents.refresh(model):
            self._version = self.contents.version
            self._modes = [vars(module) for module in self.contents.modules if "training" in vars(module)]
            return False
        return all(map(_training, self._modes))

    def with_gradients(self, model: nn.Module, optimizer: Any) -> list[nn.Parameter] | None:
        """Return the parameters with a gradient, in the order of the model.

        None if the optimizer trains one that is not in the list: the caller walks the model then, as TRL does.
        """
        self.contents.refresh(model)
        groups = getattr(optimizer, "param_groups", ())
        trained = {id(parameter) for group in groups for parameter in group["params"] if parameter.grad is not None}
        listed = [parameter for parameter in self.contents.parameters if parameter.grad is not None]
        return listed if trained <= set(map(id, listed)) else None

    def count_flops(self, trainer: Trainer, inputs: Mapping[str, Any], stock: Callable[[Any], int]) -> int:
        """Return the result of `stock`, whose factor per token is read once per run from the first batch."""
        tokens = inputs.get(getattr(trainer.model, "main_input_name", "input_ids"))
        if not isinstance(tokens, Tensor) or not tokens.numel():
            return stock(inputs)
        if self._per_token is None:
            operations = stock(inputs)
            if operations % tokens.numel():
                return operations
            self._per_token = operations // tokens.numel()
        return self._per_token * tokens.numel()


class LossFilter:
    """The NaN filter of the logged loss (``logging_nan_inf_filter``), on the device.

    TRL synchronizes after each micro-batch to check for a NaN or infinite loss, and if so adds the mean of the losses
    since the last log instead. `apply` puts that mean in the place of such a loss; a merged row is one. The
    argument is off only from there to `restore`, which is the one line of the trainer that reads it in training;
    evaluation, saving and callbacks see the user's settings.
    """

    def __init__(self) -> None:
        self._switched_off = contextlib.ExitStack()

    def apply(self, trainer: SFTTrainer, loss: Tensor) -> Tensor:
        """Return what the trainer adds to its running loss for the `loss`, (), of what just ran."""
        args, running = trainer.args, getattr(trainer, "_tr_loss", None)
        if not isinstance(running, Tensor) or running.device != loss.device or is_torch_xla_available():
            return loss  # transformers raises, or filters nothing
        if not args.logging_nan_inf_filter or not hasattr(trainer, "_globalstep_last_logged"):
            return loss
        self._switched_off.enter_context(patch_attribute(args, "logging_nan_inf_filter", False))
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        # The difference is 0 or NaN: two kernels, where `torch.isfinite` is four.
        return torch.where(loss - loss == 0, loss, running / steps)

    def restore(self) -> None:
        """Set the argument as the user had it."""
        self._switched_off.close()
