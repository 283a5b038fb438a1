"""The feature `moe`, and `apply_moe`: our experts path on a loaded model, reported per layer and reversible."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import nn

from fastpack_trl.config import refusing_removed
from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.kernels.grouped import reads_offsets
from fastpack_trl.model.changes import Patch, patch_attribute, remarked
from fastpack_trl.moe.block import NAME, STOCK, ExpertsState, fastpack_experts
from fastpack_trl.moe.layout import experts_modules, not_covered, read_gate
from fastpack_trl.moe.lora import expert_lora, router_adapters
from fastpack_trl.moe.quantized import expert_dtypes, has_quantized_experts
from fastpack_trl.run import SHARDED, Run

logger = get_logger(__name__)


class LayerPath(NamedTuple):
    """The path of an experts module, and its reason."""

    name: str
    path: str
    reason: str


@dataclass(slots=True)
class MoeReport(contextlib.AbstractContextManager["MoeReport"]):
    """Report of `apply_moe`, and a context manager that reverts on exit.

    Attributes:
        layers: one entry per experts module.
        adapters: one entry per experts module with LoRA on its stacks.
        warnings: remarks about the adapters.
    """

    layers: list[LayerPath] = field(default_factory=list)
    adapters: list[LayerPath] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _states: list[ExpertsState] = field(default_factory=list, repr=False)

    @property
    def active(self) -> int:
        """Return how many experts modules run on our path."""
        return sum(layer.path == NAME for layer in self.layers)

    @property
    def sorts(self) -> int:
        """Return the number of routing plans since `apply_moe`: one per experts module and forward or recompute."""
        return sum(state.sorts for state in self._states)

    def revert(self) -> None:
        """Restore the model as it was; a second call does nothing."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.revert()

    def summary(self) -> str:
        """Return the paths on one line, without module names: ``2 of 2 layers; LoRA on the experts of 2``."""
        parts = [f"{self.active} of {len(self.layers)} layers"] * bool(self.active) + _paths(self.layers)
        if self.adapters:
            ours = sum(adapter.path == NAME for adapter in self.adapters)
            parts += [f"LoRA on the experts of {ours}"] * bool(ours)
            parts += [f"LoRA on experts: {other}" for other in _paths(self.adapters)]
        return "; ".join([*parts, *self.warnings])

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


@refusing_removed
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
        elif reason := _reason_for_stock(module, force):
            report.layers.append(LayerPath(name, "stock", reason))
        else:
            states[module] = ExpertsState(read_gate(module))
            own_gate = states[module].gate.kind == "model"
            report.layers.append(LayerPath(name, NAME, "the model's own gate" * own_gate))
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
        for adapter in adapters:
            report.adapters.append(LayerPath(adapter.name, NAME if not adapter.reason else "peft", adapter.reason))
        report.warnings += router_adapters(model, modules)
        report._states = list(states.values())
        report._stack = stack.pop_all()
    held = Patch(report._stack)
    changed: list[Any] = [*states.values(), *adapters]
    for each in changed:
        each.installed = held
    return report


def _reason_for_stock(module: Any, force: bool) -> str:
    implementation = getattr(module.config, "_experts_implementation", "")
    if implementation == "":
        return "this transformers version has no choice of experts implementations"
    if implementation not in (STOCK, NAME, None) and not force:
        return f"experts_implementation={implementation!r} was chosen"
    return not_covered(module)


def _reading_sizes(run: Run, dtypes: set[torch.dtype]) -> str:
    """Return why experts in one of `dtypes` cannot be part of a CUDA graph, or ``""``."""
    for dtype in dtypes:
        if reads_offsets(dtype, run.device):
            capability = ".".join(map(str, torch.cuda.get_device_capability(run.device)))
            return (
                f"grouped matmuls in {str(dtype).removeprefix('torch.')} read their sizes on the host at compute "
                f"capability {capability}"
            )
    return ""


@contextlib.contextmanager
def moe(run: Run) -> Iterator[None]:
    """Run mixture-of-experts layers on our path during training; a separate evaluation runs transformers' path.

    Raises:
        ValueError: the stacks are in 4 bits, and another setting selects transformers' path.
    """
    setting, model = run.settings.moe, run.model
    present = bool(experts_modules(model))
    run.experts_refuse_capture = partial(_reading_sizes, run, expert_dtypes(model))
    # PEFT's own forward fails on 4-bit stacks, so they run on our path in evaluation too.
    quantized = present and has_quantized_experts(model)
    if not (run.training or quantized) or not (present or setting == "on"):
        yield
        return
    requested = (run.args.model_init_kwargs or {}).get("experts_implementation")
    why = "" if present else "the model has no experts that transformers dispatches"
    if setting == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = SHARDED
    elif requested is not None and setting != "on":
        why = f"experts_implementation={requested!r} was chosen"
    note = ""
    if present and run.device.type == "cuda" and not is_supported(run.device):
        note = "its kernels need compute capability 8.0; moe='on' runs it in plain torch"
        why = why or (note if setting == "auto" and not quantized else "")
    if why and quantized:
        remove = "moe_quantize_experts" if requested is None else "experts_implementation, or moe_quantize_experts"
        raise ValueError(
            f"moe_quantize_experts='on': {why}, and TRL's experts cannot train in 4 bits; on several GPUs use DDP "
            f"(accelerate_config: multi_gpu), otherwise remove {remove}"
        )
    if why:
        run.set_status("moe", "stock" if present and setting != "off" else "off", "stock", why)
        yield
        return
    with apply_moe(model, lora=run.settings.lora != "off", force=setting == "on") as applied:
        for warning in applied.warnings:
            logger.warning(warning)
        if applied.active:
            run.set_status("moe", "on", "fastpack", "; ".join([applied.summary(), *[note] * bool(note)]))
        else:
            run.set_status("moe", "stock", "stock", applied.summary().removeprefix("stock: "))
        with remarked(experts_modules(model).values(), partial(run.report.remark, "moe")):
            yield
