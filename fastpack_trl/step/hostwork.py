"""Work of the host in each micro-batch that need not be done in each: walks over modules, the filter of the loss."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers.utils import is_torch_xla_available
from trl import SFTTrainer

from fastpack_trl.model.changes import patch_attribute

_training = itemgetter("training")
_WITHOUT_MODE = (
    nn.Linear, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip
"""Exact types that compute the same in both modes: of a model with LoRA four of five modules. Embeddings are not among
them: NEFTune's hook on one asks for its mode."""


class ModelContents:
    """Modules and parameters of a model, listed again after others were put into one of its modules.

    Not seen: what is taken out, and what is written past registration (``module._parameters[name] = ...``).

    Attributes:
        version: grows with each list but the first.
        modules: of the model, in the order of ``model.modules()``.
        parameters: of the model, in the order of ``model.parameters()``.
    """

    def __init__(self) -> None:
        self.version = 0
        self.clear()

    def clear(self) -> None:
        """Hold no model."""
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self._model: nn.Module | None = None
        self._held: dict[int, tuple[nn.Module, list[object]]] = {}
        self._lists: list[nn.ModuleList] = []
        self._touched: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """See whatever is put into a module until the context ends; afterwards hold no model."""

        def registered(module: nn.Module, *_: Any) -> None:
            if id(module) in self._held:  # a forward pass makes lists of its own: ``self.layers[:n]``
                self._touched.add(id(module))

        with contextlib.ExitStack() as stack:
            stack.callback(self.clear)
            for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
                stack.callback(register(registered).remove)
            yield

    def refresh(self, model: nn.Module) -> int:
        """List `model` if it is another one or has changed; returns the version."""
        if model is not self._model:
            self.list_again(model)
        return self.current()

    def current(self) -> int:
        """Return the version, after the model that was listed last is listed again where it has changed."""
        # `ModuleList.insert` writes past registration.
        self._touched.update(id(held) for held in self._lists if len(held) != len(self._held[id(held)][1]))
        if not self._touched:
            return self.version
        touched, self._touched = self._touched, set()
        # PEFT's parametrizations of experts come and go in each forward pass: all is as before when it ends.
        changed = any(_ids(_contents(module)) != _ids(held) for module, held in map(self._held.__getitem__, touched))
        if changed and self._model is not None:
            self.list_again(self._model)
        return self.version

    def parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of `model`; walks over it only if another one is listed here."""
        if model is not self._model:
            return list(model.parameters())
        self.current()
        return self.parameters

    def list_again(self, model: nn.Module) -> None:
        """List `model`."""
        self.version += self._model is not None
        self._model = model
        self.modules, self.parameters = list(model.modules()), list(model.parameters())
        # The objects, not their ids: that of one that is gone may come again.
        self._held = {id(module): (module, _contents(module)) for module in self.modules}
        self._lists = [module for module in self.modules if type(module) is nn.ModuleList]
        self._touched = set()


def _contents(module: nn.Module) -> list[object]:
    return [*module._modules.values(), *module._parameters.values()]


def _ids(objects: list[object]) -> set[int]:
    return set(map(id, objects))


class ModeCheck:
    """Inside of `skipping_train` a ``model.train()`` that would change nothing is skipped.

    ``nn.Module.train`` writes the mode of every module through ``__setattr__``; here the modes of those that have one
    are read from a list. The first call runs, so does each after the model got other modules or parameters, and each
    where a module is in evaluation mode: a callback generated text, or the module's own ``train`` refuses training
    mode.
    """

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._version: int | None = None
        self._modes: list[dict[str, Any]] = []
        """The attributes of each module: read directly, since after a step none of this is in a cache."""

    def all_train(self, model: nn.Module) -> bool:
        """Return whether ``model.train()`` ran on the present modules, and each is still in training mode."""
        if self._version != self._contents.refresh(model):
            self._version = self._contents.version
            modules = [module for module in self._contents.modules if type(module) not in _WITHOUT_MODE]
            # torch.compile's wrapper has none of its own: it asks the module inside, which is in the list too.
            self._modes = [vars(module) for module in modules if "training" in vars(module)]
            return False
        return False not in map(_training, self._modes)

    @contextlib.contextmanager
    def skipping_train(self, model: nn.Module) -> Iterator[None]:
        """Skip needless calls of ``model.train()`` for one training step; then the model has its own again."""
        own = model.__dict__.get("train")

        def train(mode: bool = True) -> nn.Module:
            if mode and self.all_train(model):
                return model
            return own(mode) if own is not None else type(model).train(model, mode)

        with patch_attribute(model, "train", train):
            yield


class GradientReset:
    """``model.zero_grad()`` and clipping over a list of the parameters instead of a walk over all modules.

    The list is made anew when the model has changed (`ModelContents`), and when a parameter of the optimizer has a
    gradient that is not in it: one written past registration, or not the model's, which keeps it as in stock.
    """

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._model: nn.Module | None = None
        self._foreign: dict[int, nn.Parameter] = {}
        """Of the optimizer, but not of the model."""
        self._installed = contextlib.ExitStack()

    def install(self, trainer: SFTTrainer, model: nn.Module) -> None:
        """Replace ``model.zero_grad`` until `remove`; a model with a ``zero_grad`` of its own keeps it."""
        if self._model is model or type(model).zero_grad is not nn.Module.zero_grad or "zero_grad" in vars(model):
            return
        self.remove()
        self._model = model
        # A deep copy of the model has this method too: it must not keep the run alive.
        owner, ours, run = weakref.ref(model), weakref.ref(self), weakref.ref(trainer)

        def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
            reset = ours()
            if reset is None or self is not owner() or not set_to_none:  # a deep copy has other parameters
                type(self).zero_grad(self, set_to_none)
                return
            reset.reset(self, getattr(run(), "optimizer", None))

        self._installed.enter_context(patch_attribute(model, "zero_grad", types.MethodType(zero_grad, model)))

    def reset(self, model: nn.Module, optimizer: Any) -> None:
        """Set the gradients of `model` to None; `optimizer` is the one that trains now."""
        for parameter in self._complete(model, optimizer):
            if parameter.grad is not None:
                parameter.grad = None

    def _complete(self, model: nn.Module, optimizer: Any) -> list[nn.Parameter]:
        """Return the parameters of `model`; those of `optimizer` with a gradient are among them, or not the model's."""
        contents = self._contents
        contents.refresh(model)
        for again in (True, False):
            known = set(map(id, contents.parameters))
            groups = getattr(optimizer, "param_groups", ())
            trained = (parameter for group in groups for parameter in group["params"])
            beside = [p for p in trained if p.grad is not None and id(p) not in known and id(p) not in self._foreign]
            if not beside:
                break
            if again:
                contents.list_again(model)
            else:
                self._foreign.update((id(parameter), parameter) for parameter in beside)
        return contents.parameters

    def listed(self, model: nn.Module, optimizer: Any) -> WithGradients:
        """Return a stand-in for `model` whose ``parameters()`` are those with a gradient, without a walk."""
        return WithGradients(
            [parameter for parameter in self._complete(model, optimizer) if parameter.grad is not None]
        )

    def remove(self) -> None:
        """Give the model its own ``zero_grad`` again."""
        self._installed.close()
        self._model = None
        self._foreign = {}


@dataclass(frozen=True, slots=True)
class WithGradients:
    """What clipping asks of a model: its parameters; those without a gradient it would skip one by one."""

    with_gradient: list[nn.Parameter]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield those with a gradient, in the order of the model."""
        return iter(self.with_gradient)


class FlopsPerToken:
    """Trainer's ``floating_point_ops``, whose walk over all parameters gives the same factor for each batch."""

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._version: int | None = None
        self._per_token: int | None = None
        self._input = ""

    def count(self, trainer: SFTTrainer, inputs: dict[str, Any], stock: Callable[[dict[str, Any]], int]) -> int:
        """Return the result of `stock` for `inputs`; calls it for a model's first batch with tokens only."""
        # Kept: PEFT looks a name up in three objects, one after the other.
        self._input = self._input or getattr(trainer.model, "main_input_name", "input_ids")
        tokens = inputs.get(self._input)
        if not isinstance(tokens, Tensor) or not tokens.numel():
            return stock(inputs)
        if self._per_token is None or self._version != self._contents.current():
            self._per_token, self._version = None, self._contents.current()
            operations = stock(inputs)
            if operations % tokens.numel():
                return operations  # not a factor per token
            self._per_token = operations // tokens.numel()
        return self._per_token * tokens.numel()


class LossFilter:
    """The NaN filter of the logged loss (``logging_nan_inf_filter``), on the device.

    Stock asks the device after each micro-batch whether the loss is NaN or infinite, and if so adds the mean of the
    losses since the last log instead. `apply` puts that mean in the place of such a loss; a merged row is one. The
    argument is off only from there to `restore`, which is the one line of the trainer that reads it in training;
    evaluation, saving and callbacks see what the user set.
    """

    def __init__(self) -> None:
        self._switched_off = contextlib.ExitStack()

    def apply(self, trainer: SFTTrainer, loss: Tensor) -> Tensor:
        """Return what the trainer adds to its running loss for the `loss`, (), of what just ran."""
        args, running = trainer.args, getattr(trainer, "_tr_loss", None)
        if not isinstance(running, Tensor) or running.device != loss.device or is_torch_xla_available():
            return loss  # stock says what is wrong, or filters nothing
        if not args.logging_nan_inf_filter or not hasattr(trainer, "_globalstep_last_logged"):
            return loss
        self._switched_off.enter_context(patch_attribute(args, "logging_nan_inf_filter", False))
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        # The difference is 0 or NaN: two kernels, where `torch.isfinite` is four.
        return torch.where(loss - loss == 0, loss, running / steps)

    def restore(self) -> None:
        """Set the argument as the user had it."""
        self._switched_off.close()
