"""The experts function that transformers calls, and its state on each experts module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastpack_trl.model.changes import Patch
from fastpack_trl.model.hooks import PartsHooked
from fastpack_trl.moe.experts import BlockForm, ExpertWeights, experts
from fastpack_trl.moe.op import experts_in_graph
from fastpack_trl.moe.quantised import STACKS, read_stack
from fastpack_trl.moe.routing import PlanKeeper

logger = logging.get_logger(__name__)

NAME = "fastpack"
"""Under which our experts function is registered in transformers' `ExpertsInterface`."""

STOCK = "grouped_mm"
DECODE_TOKENS = 32
"""Up to so many tokens without gradients count as a decode step, which stock computes."""


@dataclass(slots=True)
class ExpertsState:
    """State that `apply_moe` hangs on an experts module that it covers.

    Attributes:
        form: of the block.
        keeper: source of its routing plans.
        hooked: whether hooks ask for stock's path, which calls the gate's activation as a module.
        installed: all that was done to the model beside this.
    """

    form: BlockForm
    keeper: PlanKeeper
    hooked: PartsHooked = field(default_factory=PartsHooked)
    installed: Patch | None = None


class LowRank(NamedTuple):
    """A low-rank addition to one stack: ``x -> scale * (x a^T) b`` per expert."""

    a: Tensor
    """(E, r, in)."""
    b: Tensor
    """(E, r, out)."""
    scale: float


def stock_experts(name: str = STOCK) -> Callable[..., Tensor]:
    """Return stock's experts function of that name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[name]
    return function


def is_decoding(module: nn.Module, hidden_th: Tensor) -> bool:
    """Return whether this call is a decode step of `generate` rather than training or evaluation."""
    return not torch.is_grad_enabled() and not module.training and hidden_th.shape[0] <= DECODE_TOKENS


def traceable(state: ExpertsState) -> bool:
    """Return whether this block runs on our path: a gate of the model's own cannot be part of a compiled graph."""
    return state.form.gate.function is None or not torch.compiler.is_compiling()


def gate_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules that stock calls in the gate of an experts module; our formulas replace those calls."""
    return [child for child in module._modules.values() if child is not None]


def fastpack_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of transformers' module `self`, called as its `ExpertsInterface` calls: no keywords.

    Args:
        self: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, k) expert ids.
        top_k_weights: (T, k) routing weights.
    """
    state: ExpertsState | None = getattr(self, "_fastpack_moe", None)
    if state is None or not traceable(state):
        return stock_experts()(self, hidden_states, top_k_index, top_k_weights)
    if state.hooked(*gate_modules(self)):
        if not torch.compiler.is_compiling():
            logger.warning_once("moe: stock (hooks on the activation of experts, which ours does not call)")
        return stock_experts()(self, hidden_states, top_k_index, top_k_weights)
    if is_decoding(self, hidden_states):
        # `generate` changes grouped_mm for batched_mm by name, off the CPU; under our name it cannot.
        name = STOCK if hidden_states.device.type == "cpu" else "batched_mm"
        return stock_experts(name)(self, hidden_states, top_k_index, top_k_weights)
    return run_experts(self, hidden_states, top_k_index, top_k_weights)


def run_experts(
    module: Any,
    hidden_th: Tensor,
    ids_tk: Tensor,
    weights_tk: Tensor,
    gate_up: LowRank | None = None,
    down: LowRank | None = None,
) -> Tensor:
    """Run our path for a module that `apply_moe` covers, with low-rank additions to its stacks.

    Args:
        module: the experts module.
        hidden_th: (T, H).
        ids_tk, weights_tk: (T, k) expert ids and routing weights.
        gate_up, down: in the dtype of the stacks.
    """
    state: ExpertsState = module._fastpack_moe
    if weights_tk.shape != ids_tk.shape:  # (T, E), as some routers of earlier transformers give them
        weights_tk = weights_tk.gather(1, ids_tk.long())
    (first, packed), (second, packed_down) = (read_stack(module, name) for name in STACKS)
    up_a, up_b, up_scale = gate_up or (None, None, 1.0)
    down_a, down_b, down_scale = down or (None, None, 1.0)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    block = ExpertWeights(first, biases[0], second, biases[1], up_a, up_b, down_a, down_b)
    form = BlockForm(state.form.gate, state.form.transposed, up_scale, down_scale, packed, packed_down)
    run = experts_in_graph if torch.compiler.is_compiling() else experts
    return run(hidden_th, weights_tk, state.keeper.plan(ids_tk), block, form)
