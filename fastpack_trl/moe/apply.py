"""`apply_moe`: our experts path on a loaded model, reported per layer and reversible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fastpack_trl.errors import first_reason
from fastpack_trl.kernels.grouped import reads_offsets
from fastpack_trl.model.changes import Patch, patch_attribute
from fastpack_trl.moe.block import NAME, STOCK, ExpertsState, fastpack_experts
from fastpack_trl.moe.layout import experts_modules, read_gate, why_not
from fastpack_trl.moe.lora import expert_lora, router_adapters
from fastpack_trl.moe.quantized import expert_dtypes


class LayerPath(NamedTuple):
    """The path of an experts module, and its reason."""

    name: str
    path: str
    reason: str


@dataclass(slots=True)
class MoeReport(contextlib.AbstractContextManager["MoeReport"]):
    """Report of `apply_moe`, and a context manager that reverts on exit."""

    layers: list[LayerPath] = field(default_factory=list)
    """One entry per experts module."""
    adapters: list[LayerPath] = field(default_factory=list)
    """One entry per experts module with LoRA on its stacks."""
    warnings: list[str] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)

    @property
    def active(self) -> int:
        """Return how many experts modules run on our path."""
        return sum(layer.path == NAME for layer in self.layers)

    def revert(self) -> None:
        """Restore the model as it was; a second call does nothing."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.revert()

    def summary(self) -> str:
        """Return the paths on one line, without module names: ``2 of 2 layers; LoRA on the experts of 2``."""
        adapted = sum(adapter.path == NAME for adapter in self.adapters)
        ours = f"{self.active} of {len(self.layers)} layers" if self.active else ""
        of_lora = [f"LoRA on the experts of {adapted}" if adapted else ""]
        of_lora += [f"LoRA on experts: {other}" for other in _paths(self.adapters)]
        return "; ".join(filter(None, [ours, *_paths(self.layers), *of_lora, *self.warnings]))

    def __str__(self) -> str:
        """Return one line per path and reason, with the number of layers."""
        of_lora = [f"expert LoRA {line}" for line in _paths(self.adapters, named=True)]
        lines = [*_paths(self.layers, named=True), *of_lora, *self.warnings]
        return "\n".join(lines) or "no experts"


def _paths(layers: list[LayerPath], *, named: bool = False) -> list[str]:
    """Return the other paths, ``["stock: 1 layer (no gate)"]``; with `named`, all paths with the names of layers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, path, reason in layers:
        groups.setdefault((path, reason), []).append(name)
    return [
        f"{path}: {len(names)} layer{'s' * (len(names) > 1)}"
        + (f", {names[0]} to {names[-1]}" if named else "")
        + (f" ({reason})" if reason else "")
        for (path, reason), names in groups.items()
        if named or path != NAME
    ]


def apply_moe(model: nn.Module, *, lora: bool = True, force: bool = False) -> MoeReport:
    """Run the mixture-of-experts layers of a loaded model on our path: tokens sorted once, one function per block.

    The function is registered in transformers' `ExpertsInterface`, and the config of each supported model names it.
    Unsupported layers (expert parallel, no gate, a norm after the experts, sharded stacks) keep transformers' path; the
    report names each with its reason. A second call adds later changes, such as LoRA that PEFT has put on the experts
    since; each report reverts its own part.

    ```python
    report = apply_moe(model)
    print(report)
    trainer.train()
    report.revert()
    ```

    Args:
        model: a transformers model, plain or inside PEFT.
        lora: run LoRA on the stacks (PEFT's `target_parameters`) as grouped low-rank matmuls. Apply after PEFT.
        force: also replace an experts implementation other than transformers' default.
    """
    report = MoeReport()
    modules = experts_modules(model)
    states: dict[nn.Module, ExpertsState] = {}
    for name, module in modules.items():
        if hasattr(module, "_fastpack_moe"):
            report.layers.append(LayerPath(name, NAME, "applied before"))
        elif reason := first_reason(_reasons_for_stock(module, force)):
            report.layers.append(LayerPath(name, "stock", reason))
        else:
            states[module] = ExpertsState(read_gate(module))
            gate = "the model's own gate" if states[module].gate.kind == "model" else ""
            report.layers.append(LayerPath(name, NAME, gate))
    with contextlib.ExitStack() as stack:
        if states:  # stays registered for copies of the model made during training
            from transformers.integrations.moe import ExpertsInterface

            ExpertsInterface.register(NAME, fastpack_experts)
        for module, state in states.items():
            stack.enter_context(patch_attribute(module, "_fastpack_moe", state))
        for config in {id(module.config): module.config for module in states}.values():
            # Set directly, because the public setter would walk all modules and write to every sub-config.
            stack.enter_context(patch_attribute(config, "_experts_implementation_internal", NAME))
        adapters = stack.enter_context(expert_lora(model)) if lora else []
        report.adapters += [LayerPath(each.name, "peft" if each.reason else NAME, each.reason) for each in adapters]
        report.warnings += router_adapters(model, modules)
        report._stack = stack.pop_all()
    changed: list[Any] = [*states.values(), *adapters]
    for each in changed:
        each.installed = Patch(report._stack)
    return report


def _reasons_for_stock(module: Any, force: bool) -> Iterator[object]:
    implementation = getattr(module.config, "_experts_implementation", "")
    yield implementation == "" and "this transformers version has no choice of experts implementations"
    chosen = implementation not in (STOCK, NAME, None) and not force
    yield chosen and f"experts_implementation={implementation!r} was chosen"
    yield from why_not(module)


def refuses_capture(model: nn.Module, device: torch.device) -> str:
    """Return why the experts of a model cannot be part of a CUDA graph, or ``""``."""
    for dtype in expert_dtypes(model):
        if reads_offsets(dtype, device):
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            kind = str(dtype).removeprefix("torch.")
            return f"grouped matmuls in {kind} read their sizes on the host at compute capability {capability}"
    return ""
