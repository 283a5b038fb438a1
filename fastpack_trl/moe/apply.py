"""`apply_moe`: our experts path on a loaded model, with a line per layer, reversible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.attention.model_features import text_model
from fastpack_trl.moe.experts import BlockForm, ExpertWeights, experts
from fastpack_trl.moe.layout import experts_modules, not_covered, read_gate
from fastpack_trl.moe.plans import PlanKeeper, plans_kept

NAME = "fastpack"
"""Under which our experts function is registered in transformers' `ExpertsInterface`."""

STOCK = "grouped_mm"
DECODE_TOKENS = 32
"""Up to so many tokens without gradients count as a decode step, which stock computes."""


@dataclass(frozen=True, slots=True)
class LayerPath:
    """Which path an experts module runs on, and why."""

    name: str
    path: str
    reason: str


@dataclass(slots=True)
class ExpertsState:
    """What `apply_moe` hangs on an experts module that it covers."""

    form: BlockForm
    keeper: PlanKeeper


@dataclass(slots=True)
class MoeReport:
    """What `apply_moe` did. Also a context manager that reverts on exit.

    Attributes:
        layers: one entry per experts module.
    """

    layers: list[LayerPath] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _keepers: list[PlanKeeper] = field(default_factory=list, repr=False)

    @property
    def active(self) -> int:
        """How many experts modules run on our path."""
        return sum(layer.path == NAME for layer in self.layers)

    @property
    def sorts(self) -> int:
        """Routing plans made since `apply_moe`: one per experts module and forward, none in a recompute."""
        return sum(keeper.sorts for keeper in self._keepers)

    def revert(self) -> None:
        """Restore the model as it was; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> MoeReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.revert()

    def __str__(self) -> str:
        """One line per path and reason, with the number of layers."""
        groups: dict[tuple[str, str], list[str]] = {}
        for layer in self.layers:
            groups.setdefault((layer.path, layer.reason), []).append(layer.name)
        lines = []
        for (path, reason), names in groups.items():
            where = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
            lines.append(f"{path}: {where}" + (f" ({reason})" if reason else ""))
        return "\n".join(lines) or "no experts"


def apply_moe(model: nn.Module, *, force: bool = False, check_plans: bool = False) -> MoeReport:
    """Run the mixture-of-experts layers of a loaded model on our path: tokens sorted once, one function per block.

    The function is registered in transformers' `ExpertsInterface`, and the config of each covered model names it.
    What is not covered (expert parallel, no gate, a norm after the experts, sharded or quantised stacks) keeps stock's
    path; the report names each with its reason.

    ```python
    report = apply_moe(model)
    print(report)
    trainer.train()
    report.revert()
    ```

    Args:
        model: a transformers model, plain or inside PEFT.
        force: also replace an experts implementation other than transformers' default.
        check_plans: compare every re-used plan with the expert ids of the recompute; asks the device, for debugging.
    """
    report = MoeReport()
    found = experts_modules(model)
    states: dict[nn.Module, ExpertsState] = {}
    for name, module in found.items():
        reason = _reason_for_stock(module, force)
        if reason:
            report.layers.append(LayerPath(name, "stock", reason))
            continue
        gate = read_gate(module)
        keeper = PlanKeeper(int(module.num_experts), check=check_plans)
        states[module] = ExpertsState(BlockForm(gate, bool(module.is_transposed)), keeper)
        report.layers.append(LayerPath(name, NAME, "the model's own gate" if gate.kind == "own" else ""))
    if not states:
        return report
    with contextlib.ExitStack() as stack:
        _register()
        for module, state in states.items():
            module._fastpack_moe = state
            stack.callback(delattr, module, "_fastpack_moe")
        for config in {id(module.config): module.config for module in states}.values():
            # Directly: the public setter would walk all modules and write to every sub-config.
            stack.callback(setattr, config, "_experts_implementation_internal", config._experts_implementation)
            config._experts_implementation_internal = NAME
        stack.enter_context(plans_kept(text_model(model), {module: state.keeper for module, state in states.items()}))
        report._keepers = [state.keeper for state in states.values()]
        report._stack = stack.pop_all()
    return report


def _reason_for_stock(module: Any, force: bool) -> str:
    implementation = getattr(module.config, "_experts_implementation", "")
    if implementation == "":
        return "this transformers has no experts implementation to choose"
    if implementation not in (STOCK, NAME, None) and not force:
        return f"experts_implementation={implementation!r} was chosen"
    return not_covered(module)


def _register() -> None:
    """It stays registered: a copy of the model taken during training runs stock's function under our name."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, fastpack_experts)


def stock_experts(name: str = STOCK) -> Callable[..., Tensor]:
    """Stock's experts function of that name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    function: Callable[..., Tensor] = ALL_EXPERTS_FUNCTIONS[name]
    return function


def is_decoding(module: nn.Module, hidden_th: Tensor) -> bool:
    """Whether this call is a decode step of `generate` rather than training or evaluation."""
    return not torch.is_grad_enabled() and not module.training and hidden_th.shape[0] <= DECODE_TOKENS


def fastpack_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of transformers' module `self`, called as its `ExpertsInterface` calls: no keywords.

    Args:
        self: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, k) expert ids.
        top_k_weights: (T, k) routing weights.
    """
    state: ExpertsState | None = getattr(self, "_fastpack_moe", None)
    if state is None:
        return stock_experts()(self, hidden_states, top_k_index, top_k_weights)
    if is_decoding(self, hidden_states):
        # `generate` changes grouped_mm for batched_mm by name, off the CPU; under our name it cannot.
        name = STOCK if hidden_states.device.type == "cpu" else "batched_mm"
        return stock_experts(name)(self, hidden_states, top_k_index, top_k_weights)
    return experts(hidden_states, top_k_weights, state.keeper.plan(top_k_index), expert_weights(self), state.form)


def expert_weights(module: Any) -> ExpertWeights:
    """The tensors of an experts module."""
    return ExpertWeights(
        module.gate_up_proj,
        module.gate_up_proj_bias if module.has_bias else None,
        module.down_proj,
        module.down_proj_bias if module.has_bias else None,
    )
