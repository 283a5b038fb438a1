"""Measure how far back each attention layer looks: exact in every dtype, where a loss only shows large errors.

A key that a query does not see has a gradient of exactly zero, one that it sees has not. So the first position with a
gradient says how many tokens a layer sees, whatever computes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.model.facts import attention_modules, text_model

Reach = dict[tuple[str, int], int]
"""Tokens that a query sees, itself included, by the name of the layer and the index of the query."""


@contextlib.contextmanager
def measured_reach(model: nn.Module, queries: Callable[[Tensor], Sequence[tuple[int, int]]]) -> Iterator[Reach]:
    """Measure each attention layer that runs inside; a layer keeps its activations only until it is measured.

    What runs inside cannot be differentiated afterwards.

    Args:
        model: a transformers causal language model, to be run on embeddings that take a gradient.
        queries: given the input of a layer, (rows, tokens, hidden), the row and the position of each query.

    Yields:
        Filled as layers run. Layers of another form are left out.
    """
    found: Reach = {}
    base = text_model(model)
    names = {module: name for name, module in base.named_modules()}
    with contextlib.ExitStack() as kept, saved_tensors_hooks(_drop, _never):

        def keep(*_: Any) -> None:
            kept.enter_context(saved_tensors_hooks(_same, _same))

        def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            kept.close()
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            out = output[0] if isinstance(output, tuple) else output
            if not all(isinstance(t, Tensor) and t.dim() == 3 and t.requires_grad for t in (hidden, out)):
                return
            asked = queries(hidden)
            for index, (row, position) in enumerate(asked):
                last = index == len(asked) - 1
                (gradient,) = torch.autograd.grad(
                    out[row, position].sum(), hidden, retain_graph=not last, allow_unused=True
                )
                seen = [] if gradient is None else gradient[row].abs().amax(-1).nonzero()
                if len(seen):
                    found[names[module], index] = position - int(seen[0]) + 1

        handles: list[Any] = []
        for module in attention_modules(base):
            handles.append(module.register_forward_pre_hook(keep))
            handles.append(module.register_forward_hook(measure, with_kwargs=True))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _drop(_tensor: Tensor) -> None:
    return None


def _never(_packed: None) -> Tensor:
    raise RuntimeError("what runs while its reach is measured keeps nothing for a backward pass")


def _same(tensor: Tensor) -> Tensor:
    return tensor
