"""Code of the user that sees single batches or their gradients: it gets them as stock makes them, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel, Trainer

from fastpack_trl.model.hooks import is_users, without_partial

_EXEMPT = frozenset({"transformers", "trl", "accelerate", "fastpack_trl"})
"""Packages whose callbacks do not look at gradients between two micro-batches, and whose methods are known."""

LOOP_METHODS = ("_inner_training_loop", "_run_epoch")
BATCH_METHODS = (
    *LOOP_METHODS, "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager", "training_step",
    "get_batch_samples", "_prepare_input", "_prepare_inputs", "_prepare_context_parallel_inputs",
)  # fmt: skip
"""Methods of a trainer that are called in training with a batch, or once for each."""


def is_upstreams(function: Any) -> bool:
    """Return whether a function is of transformers, TRL or accelerate, or ours."""
    return str(getattr(without_partial(function), "__module__", "")).partition(".")[0] in _EXEMPT


def replaced_methods(trainer: Trainer, names: Iterable[str]) -> str:
    """Return which of `names` a subclass or somebody else has replaced on this trainer; empty where none is."""
    own = [name for name in names if hasattr(trainer, name) and not is_upstreams(getattr(trainer, name))]
    return f"{', '.join(own)} of {type(trainer).__name__}" if own else ""


def hook_on_the_outputs(model: nn.Module) -> str:
    """Return a forward hook of the user that gets the outputs of `model`, called with labels; empty without one.

    Args:
        model: plain, or as PEFT, accelerate and torch wrap it.
    """
    if any(map(is_users, getattr(torch_modules, "_global_forward_hooks", {}).values())):
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
        if method is not None and not is_upstreams(method):
            return f"on_substep_end of {type(callback).__name__} comes after each micro-batch"
    return ""


def hook_on_a_gradient(model: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Return a hook on one of `parameters`, which needs the gradient of each micro-batch by itself; empty without.

    Args:
        model: whose name of the parameter is said.
        parameters: looked at once per optimizer step, which costs a fraction of a microsecond each.
    """
    for parameter in parameters:
        # The second is written by `register_post_accumulate_grad_hook`; both are None or a dictionary.
        if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and parameter.requires_grad:
            name = next((name for name, other in model.named_parameters() if other is parameter), "a parameter")
            return f"a hook on the gradient of {name} runs once per backward pass"
    return ""


def once_per_micro_batch(hook: str) -> str:
    """Return why a module hook needs micro-batches by themselves; empty without one."""
    return f"{hook} runs once per micro-batch" if hook else ""


def needs_logits(trainer: Any) -> str:
    """Return which loss of the user's, or of transformers', reads the logits; empty where none is set."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func needs the full logits"
    smooths = trainer.label_smoother is not None and trainer.args.loss_type == "nll"
    return "label smoothing needs the full logits" if smooths else ""


def trained_parameters(optimizer: Any) -> Iterable[nn.Parameter]:
    """Yield the parameters of an optimizer as it is now."""
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])
