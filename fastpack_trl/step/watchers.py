"""Code of the user that is called once per micro-batch: where there is some, micro-batches do not run as one row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_EXEMPT = frozenset({"transformers", "trl", "accelerate", "fastpack_trl"})
"""Packages whose callbacks do not look at gradients between two micro-batches."""


def callback_between(trainer: Any) -> str:
    """Why a callback needs each micro-batch to have run when the next begins; empty where none does."""
    for callback in trainer.callback_handler.callbacks:
        method = getattr(callback, "on_substep_end", None)
        if method is not None and str(getattr(method, "__module__", "")).partition(".")[0] not in _EXEMPT:
            return f"on_substep_end of {type(callback).__name__} comes after each micro-batch"
    return ""


def hook_on_a_gradient(model: nn.Module, parameters: Iterable[nn.Parameter]) -> str:
    """Why the gradient of each micro-batch has to be made by itself: a hook on one of `parameters`; empty without.

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
    """Why a module hook needs micro-batches by themselves; empty without one."""
    return f"{hook} runs once per micro-batch" if hook else ""


def trained_parameters(optimizer: Any) -> Iterable[nn.Parameter]:
    """Of the optimizer as it is now."""
    return (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])
