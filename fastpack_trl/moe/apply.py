"""`apply_moe`: our experts path on a loaded model, with a line per layer, reversible."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from fastpack_trl.model.changes import Patch, patch_attribute
from fastpack_trl.model.facts import text_model
from fastpack_trl.moe.block import NAME, STOCK, ExpertsState, fastpack_experts
from fastpack_trl.moe.experts import BlockForm
from fastpack_trl.moe.layout import experts_modules, not_covered, read_gate
from fastpack_trl.moe.lora import expert_lora, router_adapters
from fastpack_trl.moe.routing import PlanKeeper, plans_kept


class LayerPath(NamedTuple):
    """The path of an experts module, and its reason."""

    name: str
    path: str
    reason: str


@dataclass(slots=True)
class MoeReport:
    """Report of `apply_moe`, and a context manager that reverts on exit.

    Attributes:
        layers: one entry per experts module.
        adapters: one entry per experts module with LoRA on its stacks.
        warnings: what the user should know about the adapters.
    """

    layers: list[LayerPath] = field(default_factory=list)
    adapters: list[LayerPath] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _keepers: list[PlanKeeper] = field(default_factory=list, repr=False)

    @property
    def active(self) -> int:
        """Return how many experts modules run on our path."""
        return sum(layer.path == NAME for layer in self.layers)

    @property
    def sorts(self) -> int:
        """Return the routing plans made since `apply_moe`: one per experts module and forward, none in a recompute."""
        return sum(keeper.sorts for keeper in self._keepers)

    def revert(self) -> None:
        """Restore the model as it was; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> MoeReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()

    def summary(self) -> str:
        """Return the paths on one line, without names of modules: ``2 of 2 layers; LoRA on the experts of 2``."""
        parts = [f"{self.active} of {len(self.layers)} layers"] * bool(self.active) + _others(self.layers)
        if self.adapters:
            ours = sum(adapter.path == NAME for adapter in self.adapters)
            parts += [f"LoRA on the experts of {ours}"] * bool(ours)
            parts += [f"LoRA on experts: {other}" for other in _others(self.adapters)]
        return "; ".join([*parts, *self.warnings])

    def __str__(self) -> str:
        """Return one line per path and reason, with the number of layers."""
        lines = _summary(self.layers) + [f"expert LoRA {line}" for line in _summary(self.adapters)] + self.warnings
        return "\n".join(lines) or "no experts"


def apply_moe(model: nn.Module, *, lora: bool = True, force: bool = False, check_plans: bool = False) -> MoeReport:
    """Run the mixture-of-experts layers of a loaded model on our path: tokens sorted once, one function per block.

    The function is registered in transformers' `ExpertsInterface`, and the config of each covered model names it.
    What is not covered (expert parallel, no gate, a norm after the experts, sharded or quantised stacks) keeps stock's
    path; the report names each with its reason. A second call adds what the first could not see, such as LoRA that PEFT
    put on the experts since; each report reverts its own part.

    ```python
    report = apply_moe(model)
    print(report)
    trainer.train()
    report.revert()
    ```

    Args:
        model: a transformers model, plain or inside PEFT.
        lora: run LoRA on the stacks (PEFT's `target_parameters`) as grouped low-rank products. Apply after PEFT.
        force: also replace an experts implementation other than transformers' default.
        check_plans: compare every re-used plan with the expert ids of the recompute; synchronises, for debugging.
    """
    report = MoeReport()
    found = experts_modules(model)
    states: dict[nn.Module, ExpertsState] = {}
    for name, module in found.items():
        if hasattr(module, "_fastpack_moe"):
            report.layers.append(LayerPath(name, NAME, "applied before"))
            continue
        reason = _reason_for_stock(module, force)
        if reason:
            report.layers.append(LayerPath(name, "stock", reason))
            continue
        gate = read_gate(module)
        keeper = PlanKeeper(int(module.num_experts), check=check_plans)
        states[module] = ExpertsState(BlockForm(gate, bool(module.is_transposed)), keeper)
        report.layers.append(LayerPath(name, NAME, "the model's own gate" if gate.kind == "model" else ""))
    with contextlib.ExitStack() as stack:
        if states:  # it stays: a copy of the model taken during training runs stock's under our name
            from transformers.integrations.moe import ExpertsInterface

            ExpertsInterface.register(NAME, fastpack_experts)
        for module, state in states.items():
            stack.enter_context(patch_attribute(module, "_fastpack_moe", state))
        for config in {id(module.config): module.config for module in states}.values():
            # Directly: the public setter would walk all modules and write to every sub-config.
            stack.enter_context(patch_attribute(config, "_experts_implementation_internal", NAME))
        # The backbone and not the whole model: some call it without the head.
        if states:
            backbone = getattr(text_model(model), "base_model", model)
            stack.enter_context(plans_kept(backbone, {module: state.keeper for module, state in states.items()}))
        adapters = stack.enter_context(expert_lora(model)) if lora else []
        for adapter in adapters:
            report.adapters.append(LayerPath(adapter.name, NAME if not adapter.reason else "peft", adapter.reason))
        report.warnings = router_adapters(model, found)
        report._keepers = [state.keeper for state in states.values()]
        report._stack = stack.pop_all()
    held = Patch(report._stack)
    changed: list[Any] = [*states.values(), *adapters]
    for each in changed:
        each.installed = held
    return report


def _others(layers: list[LayerPath]) -> list[str]:
    """Return the paths that are not ours: ``["stock: 1 layer (no gate)"]``."""
    counts = Counter((layer.path, layer.reason) for layer in layers if layer.path != NAME)
    return [f"{path}: {count} layer{'s' * (count > 1)} ({reason})" for (path, reason), count in counts.items()]


def _summary(layers: list[LayerPath]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, path, reason in layers:
        groups.setdefault((path, reason), []).append(name)
    lines = []
    for (path, reason), names in groups.items():
        where = names[0] if len(names) == 1 else f"{len(names)} layers, {names[0]} to {names[-1]}"
        lines.append(f"{path}: {where}" + (f" ({reason})" if reason else ""))
    return lines


def _reason_for_stock(module: Any, force: bool) -> str:
    implementation = getattr(module.config, "_experts_implementation", "")
    if implementation == "":
        return "this transformers has no experts implementation to choose"
    if implementation not in (STOCK, NAME, None) and not force:
        return f"experts_implementation={implementation!r} was chosen"
    return not_covered(module)
