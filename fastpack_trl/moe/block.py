"""The experts function that transformers calls, and its state on each experts module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastpack_trl.kernels.dequantize import Scales
from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.model.changes import Patch, hand_over
from fastpack_trl.model.hooks import PartsHooked
from fastpack_trl.moe.experts import Form, Stack, StackForm, experts
from fastpack_trl.moe.layout import STACKS
from fastpack_trl.moe.quantized import read_stack
from fastpack_trl.moe.routing import routing_plan

NAME = "fastpack"
"""Name of our experts function in transformers' `ExpertsInterface`."""

STOCK = "grouped_mm"
DECODE_TOKENS = 32
"""Up to this many tokens without gradients count as a decode step, which transformers computes."""


@dataclass(slots=True)
class ExpertsState:
    """State that `apply_moe` attaches to a supported experts module."""

    gate: Gate
    hooked: PartsHooked = field(default_factory=PartsHooked)
    """Whether hooks need transformers' path, which calls the gate's activation as a module."""
    installed: Patch | None = None
    """All other changes of the model."""


class LowRank(NamedTuple):
    """A low-rank addition to one stack: ``x -> scale * (x a^T) b`` per expert."""

    a: Tensor | None = None
    """(E, r, in)."""
    b: Tensor | None = None
    """(E, r, out)."""
    scale: float = 1.0


def is_decoding(module: nn.Module, hidden_th: Tensor) -> bool:
    """Return whether this call is a decode step of `generate` rather than training or evaluation."""
    return not torch.is_grad_enabled() and not module.training and hidden_th.shape[0] <= DECODE_TOKENS


def traceable(state: ExpertsState) -> bool:
    """Return whether this block runs on our path: the model's own gate cannot be part of a compiled graph."""
    return state.gate.function is None or not torch.compiler.is_compiling()


def fastpack_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of transformers' module `self`, called as its `ExpertsInterface` calls: no keywords.

    (T, H) hidden states with (T, k) expert ids and routing weights; returns (T, H).
    """
    state: ExpertsState | None = getattr(self, "_fastpack_moe", None)
    name = ""
    if state is None or not traceable(state):
        name = STOCK
    elif state.hooked(*self.children()):  # which transformers calls in the gate, and our formulas replace
        name = STOCK
        hand_over(self, "moe", "transformers' experts run (our kernel calls no hooks on their activation)")
    elif is_decoding(self, hidden_states):
        # Off the CPU, `generate` replaces the name grouped_mm by batched_mm; it does not know our name.
        name = STOCK if hidden_states.device.type == "cpu" else "batched_mm"
    if name:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        return cast("Tensor", ALL_EXPERTS_FUNCTIONS[name](self, hidden_states, top_k_index, top_k_weights))
    return run_experts(self, hidden_states, top_k_index, top_k_weights, {})


def run_experts(
    module: Any, hidden_th: Tensor, ids_tk: Tensor, weights_tk: Tensor, factors: Mapping[str, LowRank]
) -> Tensor:
    """Run our path for a supported experts module, with low-rank additions to its stacks, by name, in their dtype."""
    state: ExpertsState = module._fastpack_moe
    if weights_tk.shape != ids_tk.shape:  # (T, E) from some routers of earlier transformers
        weights_tk = weights_tk.gather(1, ids_tk.long())
    plan = routing_plan(ids_tk, int(module.num_experts))
    (first, up_form), (second, down_form) = (_stack(module, name, factors.get(name, LowRank())) for name in STACKS)
    form = Form(state.gate, bool(module.is_transposed), up_form, down_form)
    return experts(hidden_th, weights_tk, plan, first, second, form)


def _stack(module: Any, name: str, low_rank: LowRank) -> tuple[Stack, StackForm]:
    weight, state = read_stack(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if state is None:
        return Stack(weight, bias, low_rank.a, low_rank.b), StackForm(low_rank.scale)
    nested, (experts, rows, columns) = state.state2.blocksize if state.nested else 0, state.shape
    form = StackForm(low_rank.scale, state.quant_type, state.blocksize, nested, experts, rows, columns, state.dtype)
    return Stack(weight, bias, low_rank.a, low_rank.b, *Scales.of(state)), form
