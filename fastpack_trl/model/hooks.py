"""User code that sees single batches or gradients: module hooks, callbacks, methods of a trainer.

Such code gets batches one by one, as TRL makes them; a module with a user's hook runs the library's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer, TrainerCallback

from fastpack_trl.model.walk import modules_of

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The dictionaries of a module; `torch.nn.modules.module` has one of each for all modules, after ``_global``."""
_LIBRARIES = (
    *("accelerate.", "bitsandbytes.", "deepspeed.", "fastpack_trl.", "peft.", "transformers.", "trl."),
    *("torch.distributed.", "torch.nn.parallel.", "torch.nn.utils.", "torch.utils."),
)
"""Packages whose hooks are part of the model, and whose callbacks and methods need no single micro-batch."""
_CACHES = "bitsandbytes.nn.parametrize"
"""Its hooks keep a dense stack during a call of a module: code that skips the call needs none."""
LOOP_METHODS = ("_inner_training_loop", "_run_epoch")
BATCH_METHODS = (
    *LOOP_METHODS,
    *("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "training_step"),
    *("get_batch_samples", "_prepare_input", "_prepare_inputs", "_prepare_context_parallel_inputs"),
)
"""Methods of a trainer that are called in training with a batch, or once for each."""


def is_users(function: Any) -> bool:
    """Return whether a hook or a method belongs to the user, by the module that defines its function or class.

    `functools.wraps` gives a wrapper the module of what it wraps: each function inside must be a library's, or a
    decorator of torch or Python.
    """
    function = _unwrapped(function)
    if not f"{getattr(function, '__module__', '')}.".startswith(_LIBRARIES):
        return True
    while (scope := getattr(function, "__globals__", None)) is not None:
        name = str(scope.get("__name__"))
        if not f"{name}.".startswith((*_LIBRARIES, "torch.")) and name.partition(".")[0] not in sys.stdlib_module_names:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _unwrapped(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def is_hooked(module: Any) -> bool:
    """Return whether a call of `module` runs more than the forward of its class: any hook, or a forward of its own."""
    if "forward" in module.__dict__:
        return True
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return False  # most modules; this runs for every projection in every step
    return any(getattr(hook, "__module__", "") != _CACHES for kind in _KINDS for hook in getattr(module, kind).values())


def has_global_hooks() -> bool:
    """Return whether the user has a hook on all modules."""
    return bool(_users_hook(nn.modules.module, "_global"))


class PartsHooked:
    """Tells a forward that replaces calls of its parts whether a part has a hook and must be called.

    A recompute gets the answer of its forward: a checkpoint compares what both save.
    """

    def __init__(self) -> None:
        self._last = False

    def __call__(self, *parts: nn.Module) -> bool:
        """Return whether a call of one of `parts` would run a hook or a replaced forward."""
        answer = any(map(is_hooked, parts))
        if torch.compiler.is_compiling():  # in a graph torch traces the hooks on all modules
            return answer
        answer = answer or has_global_hooks()
        if answer != self._last and not in_backward():
            self._last = answer
        return self._last


def hook_inside(module: nn.Module) -> str:
    """Describe the first user hook that a call of `module` runs, e.g. ``the forward hook f on layers.1.mlp``."""
    if hook := _users_hook(nn.modules.module, "_global"):
        return f"the global {hook}"
    for inner in modules_of(module):  # a walk that makes the names takes five times as long
        if is_hooked(inner) and (hook := _users_hook(inner)):
            own = next(own for own, hooked in module.named_modules() if hooked is inner)
            return f"the {hook} on {own or type(inner).__name__}"
    return ""


def _users_hook(owner: Any, prefix: str = "") -> str:
    """Return kind and name of the first user's hook on a module; empty if there is none."""
    for kind in _KINDS:
        # A torch without the global dictionaries lacks a name of "batches" in `model.upstream.NEEDS`.
        for hook in filter(is_users, getattr(owner, prefix + kind, {}).values()):
            function = _unwrapped(hook)
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"{kind[1:-1].replace('pre_', 'pre-').replace('_', ' ')} {name.rpartition('<locals>.')[2]}"
    return ""


class HookWatch:
    """The user's hooks that a call of one module runs; `found` is the last answer of `look`."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.found, self._handles = module, "", -1

    def look(self) -> str:
        """Return `hook_inside`, searched if a hook was found or one of any kind was registered since."""
        handles = getattr(RemovableHandle, "next_id", -1)  # grows with each registration
        if self.found or handles == -1 or handles != self._handles:
            self.found, self._handles = hook_inside(self.module), handles
        return self.found


@contextmanager
def users_hooks_off(model: nn.Module) -> Iterator[None]:
    """Disable every module hook of the user; global ones are disabled in the whole process.

    Exit restores the hooks in their order, except for those removed in the meantime.
    """
    dictionaries = [getattr(module, kind) for module in modules_of(model) for kind in _KINDS]
    dictionaries += [getattr(nn.modules.module, f"_global{kind}", {}) for kind in _KINDS]
    hidden = [(hooks, key, hook) for hooks in dictionaries for key, hook in hooks.items() if is_users(hook)]
    for hooks, key, _ in hidden:
        hooks[key] = lambda *_args, **_keywords: None  # in its place: its handle still removes it
    try:
        yield
    finally:
        for hooks, key, hook in hidden:
            if key in hooks:
                hooks[key] = hook


def in_backward() -> bool:
    """Return whether autograd is running on this thread: a layer that is called now is recomputed."""
    running = getattr(torch._C, "_current_graph_task_id", None)  # torch.utils.checkpoint uses it for the same question
    return running is not None and running() != -1


def replaced_methods(trainer: Trainer, names: Iterable[str]) -> str:
    """Return which of `names` a subclass or other code has replaced on this trainer, or ``""``."""
    own = [name for name in names if hasattr(trainer, name) and is_users(getattr(trainer, name))]
    return f"{', '.join(own)} of {type(trainer).__name__}" if own else ""


def hook_on_the_outputs(model: nn.Module) -> str:
    """Return the user's forward hook that gets the outputs of `model`, plain or wrapped; empty if none."""
    if any(map(is_users, getattr(nn.modules.module, "_global_forward_hooks", {}).values())):
        return "a forward hook on all modules"
    for module in model.modules():  # the wrappers from the outside in, then the model that has the head
        if any(map(is_users, module._forward_hooks.values())):
            return f"a forward hook on {type(module).__name__}"
        if isinstance(module, PreTrainedModel):
            break
    return ""


def callback_between(trainer: Trainer) -> str:
    """Return which callback needs each micro-batch to have run when the next begins; empty if none does."""
    for callback in trainer.callback_handler.callbacks:
        if is_users(getattr(callback, "on_substep_end", TrainerCallback.on_substep_end)):
            return f"on_substep_end of {type(callback).__name__} comes after each micro-batch"
    return ""


def ends_early(trainer: Trainer) -> bool:
    """Return whether the epoch or the run ends after the micro-batch that is next: a callback said so at the step."""
    return bool(trainer.control.should_epoch_stop or trainer.control.should_training_stop)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a hook sees the gradient of a parameter, before it is accumulated or after."""
    # The second is written by `register_post_accumulate_grad_hook`; both are None or a dictionary.
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hook_on_a_gradient(model: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Return a hook on one of `parameters` of `model`, which needs the gradient of each micro-batch; empty if none."""
    for parameter in parameters:
        if has_gradient_hooks(parameter) and parameter.requires_grad:
            name = next((name for name, other in model.named_parameters() if other is parameter), "a parameter")
            return f"a hook on the gradient of {name} runs once per backward pass"
    return ""


def needs_logits(trainer: Any) -> str:
    """Return which loss of the user or of transformers reads the logits; empty if none is set."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func needs the full logits"
    smooths = trainer.label_smoother is not None and trainer.args.loss_type == "nll"
    return "label smoothing needs the full logits" if smooths else ""


def trained_parameters(optimizer: Any) -> Iterable[nn.Parameter]:
    """Yield the parameters of an optimizer as it is now."""
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])
