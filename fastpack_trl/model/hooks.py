"""Code of the user that sees single batches or gradients: module hooks, callbacks, methods of a trainer.

It gets them as stock makes them, one by one: where there is some, how to run a model without its hooks.

The rule for module hooks: where a hook of somebody else is on a module, that module runs as stock. Who may ask what is
called there is `hook_inside`, with a name for the report; whoever goes past the call of a module asks `PartsHooked`.
torch announces no registration, but the id of `RemovableHandle` grows with each: only then `HookWatch` searches, and
while a hook is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""The dictionaries of a module; `torch.nn.modules.module` has one of each for all modules."""

_KNOWN = tuple(
    f"{package}."
    for package in (
        "accelerate", "bitsandbytes", "deepspeed", "fastpack_trl", "peft", "transformers", "trl",
        "torch.distributed", "torch.nn.parallel", "torch.nn.utils", "torch.utils",
    )
)  # fmt: skip
"""Packages whose hooks are part of the model (they record outputs, gather shards, make weights), whose callbacks do not
look at gradients between two micro-batches, and whose methods are known."""
_CACHES = "bitsandbytes.nn.parametrize"
"""Its hooks keep a dense stack within a call of a module: whoever makes no such call needs none."""

LOOP_METHODS = ("_inner_training_loop", "_run_epoch")
BATCH_METHODS = (
    *LOOP_METHODS, "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "training_step",
    "get_batch_samples", "_prepare_input", "_prepare_inputs", "_prepare_context_parallel_inputs",
)  # fmt: skip
"""Methods of a trainer that are called in training with a batch, or once for each."""


def _without_partial(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def is_users(function: Any) -> bool:
    """Return whether a hook or a method is the user's, by the module that defines its function or class."""
    return not f"{getattr(_without_partial(function), '__module__', '')}.".startswith(_KNOWN)


def is_hooked(module: Any) -> bool:
    """Return whether a call of `module` runs more than the forward of its class: any hook, or a forward of its own."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return "forward" in module.__dict__  # most modules: this is asked for every projection in every step
    hooks = (hook for kind in _KINDS for hook in getattr(module, kind).values())
    return "forward" in module.__dict__ or any(getattr(hook, "__module__", "") != _CACHES for hook in hooks)


class PartsHooked:
    """Whether a forward that goes past the calls of its parts must leave them to stock: asked in each.

    A recompute gets the answer of its forward: a checkpoint compares what both save, so a hook that came or went
    between must not change the way.
    """

    def __init__(self) -> None:
        self._last = False

    def __call__(self, *parts: nn.Module) -> bool:
        """Return whether a call of one of `parts` would run a hook or a replaced forward."""
        if torch.compiler.is_compiling():  # in a graph torch traces the hooks on all modules
            return any(map(is_hooked, parts))
        answer = any(map(is_hooked, parts)) or bool(global_hook())
        if answer != self._last:
            if in_backward():
                return self._last
            self._last = answer
        return answer


def global_hook() -> str:
    """Return a hook of the user on every module, e.g. ``the global forward hook count``; empty without."""
    found = _first_of_users(_global_dictionaries()) if any(_global_dictionaries()) else ""
    return f"the global {found}" if found else ""


def hook_inside(module: nn.Module, name: str = "") -> str:
    """Return a hook of the user that a call of `module` reaches: global, on it, or further inside; empty without.

    ``the forward hook scale on layers.1.mlp``, after the name of the module where it is given.
    """
    if found := global_hook():
        return found
    modules: list[Any] = [module]
    for inner in modules:  # grows; names are made where there is a hook, since they take five times as long
        if is_hooked(inner) and (found := _first_of_users(getattr(inner, attribute) for attribute in _KINDS)):
            own = next(own for own, hooked in module.named_modules(prefix=name) if hooked is inner)
            return f"the {found} on {own or type(inner).__name__}"
        modules += [child for child in inner._modules.values() if child is not None]
    return ""


class HookWatch:
    """The hooks of the user that a call of one module reaches, looked for only where one may have come or gone."""

    def __init__(self, module: nn.Module, name: str = "") -> None:
        self.module, self.name = module, name
        self.found = ""
        """As `hook_inside` said last."""
        self._handles: int | None = None

    def look(self) -> str:
        """Return what `hook_inside` says now. Costs two comparisons where no hook of any kind was registered since."""
        handles = getattr(RemovableHandle, "next_id", None)
        if self.found or handles is None or handles != self._handles:
            self._handles = handles
            self.found = hook_inside(self.module, self.name)
        return self.found


@contextlib.contextmanager
def users_hooks_off(model: nn.Module) -> Iterator[None]:
    """Hide forward and backward passes in this context from every module hook of the user, also from global ones.

    Afterwards the hooks are there again, in their order, but for those that were removed meanwhile. Global hooks are
    off for the whole process while the context is open.
    """
    dictionaries = [getattr(module, attribute) for module in model.modules() for attribute in _KINDS]
    dictionaries += _global_dictionaries()
    taken = [(hooks, key, hook) for hooks in dictionaries for key, hook in hooks.items() if is_users(hook)]
    for hooks, key, _ in taken:
        hooks[key] = _silent  # in its place: its handle still removes it
    try:
        yield
    finally:
        for hooks, key, hook in taken:
            if key in hooks:
                hooks[key] = hook


def _silent(*_args: Any, **_keywords: Any) -> None:
    """Stand in for a hook that is off: inputs and outputs of the module stay."""


def in_backward() -> bool:
    """Return whether autograd is running on this thread: a layer that is called now is recomputed."""
    running = getattr(torch._C, "_current_graph_task_id", None)  # as torch.utils.checkpoint asks it
    return running is not None and running() != -1


@cache
def _global_dictionaries() -> tuple[dict[int, Any], ...]:
    # A torch without one of them is named by what `model.upstream` asks for "batches".
    return tuple(getattr(nn.modules.module, f"_global{name}", {}) for name in _KINDS)


def _first_of_users(dictionaries: Any) -> str:
    """Return the kind and the name of a hook in dictionaries in the order of `_KINDS`; empty without one."""
    for kind, hooks in zip(_KINDS.values(), dictionaries, strict=True):
        for hook in filter(is_users, hooks.values()):
            function = _without_partial(hook)
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"{kind} {name.rpartition('<locals>.')[2]}"
    return ""


def replaced_methods(trainer: Trainer, names: Iterable[str]) -> str:
    """Return which of `names` a subclass or somebody else has replaced on this trainer; empty where none is."""
    own = [name for name in names if hasattr(trainer, name) and is_users(getattr(trainer, name))]
    return f"{', '.join(own)} of {type(trainer).__name__}" if own else ""


def hook_on_the_outputs(model: nn.Module) -> str:
    """Return a forward hook of the user that gets the outputs of `model`, called with labels; empty without one.

    Args:
        model: plain, or as PEFT, accelerate and torch wrap it.
    """
    if any(map(is_users, getattr(nn.modules.module, "_global_forward_hooks", {}).values())):
        return "a forward hook on all modules"
    for module in model.modules():  # the wrappers from the outside in, then the model that has the head
        if any(map(is_users, module._forward_hooks.values())):
            return f"a forward hook on {type(module).__name__}"
        if isinstance(module, PreTrainedModel):
            break
    return ""


def callback_between(trainer: Trainer) -> str:
    """Return which callback needs each micro-batch to have run when the next begins; empty where none does."""
    for callback in trainer.callback_handler.callbacks:
        method = getattr(callback, "on_substep_end", None)
        if method is not None and is_users(method):
            return f"on_substep_end of {type(callback).__name__} comes after each micro-batch"
    return ""


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a hook sees the gradient of a parameter, before it is accumulated or after."""
    # The second is written by `register_post_accumulate_grad_hook`; both are None or a dictionary.
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hook_on_a_gradient(model: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Return a hook on one of `parameters`, which needs the gradient of each micro-batch by itself; empty without.

    Args:
        model: whose name of the parameter is said.
        parameters: looked at once per optimizer step, which costs a fraction of a microsecond each.
    """
    for parameter in parameters:
        if has_gradient_hooks(parameter) and parameter.requires_grad:
            name = next((name for name, other in model.named_parameters() if other is parameter), "a parameter")
            return f"a hook on the gradient of {name} runs once per backward pass"
    return ""


def needs_logits(trainer: Any) -> str:
    """Return which loss of the user's, or of transformers', reads the logits; empty where none is set."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func needs the full logits"
    smooths = trainer.label_smoother is not None and trainer.args.loss_type == "nll"
    return "label smoothing needs the full logits" if smooths else ""


def trained_parameters(optimizer: Any) -> Iterable[nn.Parameter]:
    """Yield the parameters of an optimizer as it is now."""
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])
