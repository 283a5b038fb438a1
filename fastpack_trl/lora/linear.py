"""`apply_lora`: PEFT's LoRA layers keep their parameters, names and files, and get a forward with fewer kernels.

A layer is switched by changing its class: nothing is looked up at run time, a compiler sees an ordinary module, and
calls that the fast forward does not support run `super().forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fastpack_trl.errors import first_reason, short_repr
from fastpack_trl.lora.adapters import CastAdapter, CastHook, autocasts, is_sharded
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, HasFrozenWeight, from_4bit
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.lora.report import LoraReport, declined, keep_copies
from fastpack_trl.lora.siblings import Kept, Part, Siblings, find_siblings
from fastpack_trl.model.changes import hand_over
from fastpack_trl.model.facts import backbones, text_model
from fastpack_trl.model.hooks import PartsHooked, is_hooked
from fastpack_trl.model.precision import emulates_bf16
from fastpack_trl.model.upstream import Conv1D, FakeTensor, LoraLayer, LoraLinear

_AUTOCAST_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
# Compared by name, because bitsandbytes is optional; PEFT imports it only for its layers.
_QUANTIZED = ("Linear4bit", "Linear8bitLt")


class FastLora(HasFrozenWeight):
    """Base class put before PEFT's class of a LoRA layer. Never constructed: `apply_lora` sets a layer's class."""

    fastpack_cast: CastAdapter | None = None
    """The adapter in the compute dtype while a step runs; set by the backbone's hook."""
    fastpack_hooked: PartsHooked
    """Whether hooks need PEFT's forward, which calls the parts of the layer as modules."""
    fastpack_siblings: Siblings | None = None
    """Layers of the same parent that may read the same input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # A compiler need not look at them.
        siblings = None if torch.compiler.is_compiling() or args or kwargs else self.fastpack_siblings
        if siblings is not None and (kept := siblings.kept.take(self, x)) is not None:
            return kept
        part = None if args or kwargs else self.fastpack_part(x)
        if part is None:
            out: Tensor = super().forward(x, *args, **kwargs)  # PEFT's own
            return out
        if siblings is not None and (joint := siblings.project(self, x, part)) is not None:
            return joint
        rows = x if x.dtype == part.dtype else x.to(part.dtype)
        dropped = None if part.dropout is None else part.dropout(rows)
        if part.frozen is None:
            result: Tensor = self._modules["base_layer"](x)
            return result + F.linear(F.linear(rows if dropped is None else dropped, part.a), part.b).to(result.dtype)
        return lora_projection(rows, part.frozen, part.a, part.b, part.bias, dropped).to(part.result)

    def fastpack_part(self, x: Tensor) -> Part | None:
        """Return what a call with `x` reads; None if PEFT must handle it."""
        if (supported := self._fastpack_adapter(x)) is None:
            return None
        a, b, scaling, dropout, base, dtype = supported
        cast_adapter = self.fastpack_cast
        if cast_adapter is not None and cast_adapter.serves(a, b, scaling, dtype):
            a, b = cast_adapter.a, cast_adapter.b
        elif a.dtype != dtype or scaling != 1:
            a, b = a.to(dtype), (b if scaling == 1 else b * scaling).to(dtype)  # not called through its backbone
        kind = type(base).__name__
        if kind == "Linear8bitLt":
            return Part(None, a, b, None, dropout, dtype, dtype)
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        copied: Any = self.fastpack_dense
        if copied is not None and copied.serves(dtype) and self._fastpack_is_source(weight):
            frozen = copied
        elif kind == "Linear4bit":
            frozen = from_4bit(weight)
        else:
            dense = weight if weight.dtype == dtype else weight.to(dtype)
            frozen = BaseWeight(dense.t() if kind == "Conv1D" else dense)
        result = dtype
        if kind == "Linear4bit":
            # bitsandbytes returns its input's dtype. PEFT adds a matmul in the compute dtype; off CUDA, in the input's.
            result = torch.promote_types(x.dtype, dtype) if x.is_cuda else x.dtype
        return Part(frozen, a, b, None if bias is None else bias.to(dtype), dropout, dtype, result)

    def fastpack_active_adapter(self) -> tuple[Tensor, Tensor, float] | None:
        """Return A, B and the scaling of the only active adapter; None if no or several adapters are active."""
        name, layer = self._fastpack_active_name(), cast("Any", self)
        if name is None:
            return None
        a, b = (layer._modules[factor]._modules[name]._parameters.get("weight") for factor in ("lora_A", "lora_B"))
        return None if a is None or b is None else (a, b, float(layer.scaling[name]))

    def _fastpack_active_name(self) -> str | None:
        layer: Any = self
        if layer.disable_adapters or layer.merged or len(active := layer.active_adapters) != 1:
            return None
        return active[0] if active[0] in layer._modules["lora_A"]._modules else None

    def _fastpack_adapter(self, x: Tensor) -> tuple[Tensor, Tensor, float, Any, Any, torch.dtype] | None:
        """Return A, B, scaling, dropout (None if inactive), base, and the dtype to compute in.

        None if PEFT must handle this call. This runs for every projection in every step, so modules are read from their
        dictionaries instead of through `nn.Module.__getattr__`.
        """
        layer: Any = self
        name = self._fastpack_active_name()
        if name is None or name in layer.lora_variant or layer.lora_bias.get(name, False):
            return None
        if not (layer.training or torch.is_grad_enabled() or isinstance(self.fastpack_dense, Fp8Weight)):
            return None
        modules = layer._modules
        first, second, dropout = (modules[part]._modules[name] for part in ("lora_A", "lora_B", "lora_dropout"))
        base = modules["base_layer"]
        hooked = self.fastpack_hooked(first, second, base, dropout)
        # None: parametrized, or in a replica of `nn.DataParallel`.
        a, b, weight = (part._parameters.get("weight") for part in (first, second, base))
        if hooked:
            reason = "hooks on a part of a LoRA layer or on every module, or a replaced forward"
        elif a is None or b is None or weight is None:
            reason = "weights that are not parameters (parametrized, or a replica)"
        elif (dtype := _fitting_dtype(x, a, b, base, weight)) is None:
            reason = (
                f"input {x.dtype}, adapters {a.dtype}, base {type(base).__name__} {weight.dtype}, {x.device.type}; "
                "bf16=True or adapters in the dtype of the input would be fast"
            )
        else:
            drops = dropout.training and getattr(dropout, "p", 0.0) != 0.0
            return a, b, layer.scaling[name], dropout if drops else None, base, dtype
        if not torch.compiler.is_compiling():
            declined[self] = reason  # counted by `LoraReport.call_by_call`
        hand_over(self, "lora", f"peft ({reason})")
        return None


def _fitting_dtype(x: Tensor, a: Tensor, b: Tensor, base: Any, weight: Any) -> torch.dtype | None:
    """Return the dtype to compute in; None if the fast forward does not support it or the device."""
    device = x.device
    if weight.requires_grad or not (device == a.device == b.device == weight.device):
        return None
    autocast = autocasts(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else x.dtype
    if autocast:
        if x.dtype not in _AUTOCAST_INPUTS or a.dtype not in _AUTOCAST_INPUTS:
            return None
    elif not a.dtype == b.dtype == dtype:  # PEFT computes such an adapter in its own dtype
        return None
    kind = type(base).__name__
    if kind == "Linear4bit":
        state: Any = getattr(weight, "quant_state", None)
        # Evaluation on the CPU has repacked the weight in another layout.
        if state is None or getattr(state, "packing_format_for_cpu", False) or x.shape[-1] != state.shape[1]:
            return None
        return dtype if base.compute_dtype == dtype or (autocast and base.compute_dtype == torch.float32) else None
    return dtype if kind == "Linear8bitLt" or autocast or weight.dtype == dtype else None


@cache
def _fast_class(stock: Any) -> Any:
    """Return the class to set, made on use: PEFT's layers over bitsandbytes are optional."""
    return type(f"Fast{stock.__name__}", (FastLora, stock), {"__module__": __name__, "__doc__": FastLora.__doc__})


def __getattr__(name: str) -> Any:
    # A model pickled during training refers to its classes in this module.
    if name == "FastLinear":
        return _fast_class(LoraLinear)
    if name in {f"Fast{stock}" for stock in _QUANTIZED}:
        from peft.tuners.lora import bnb

        return _fast_class(getattr(bnb, name.removeprefix("Fast")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def apply_lora(model: nn.Module, *, compute_dtype: torch.dtype | None = None) -> LoraReport:
    """Speed up the forward and backward of a PEFT model's LoRA layers; parameters and files are unchanged.

    ```python
    model = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    report = apply_lora(model)
    ...
    report.revert()
    ```

    Supported: `nn.Linear`, `Conv1D`, bitsandbytes 4-bit and 8-bit bases; one active adapter; dropout, rslora, rank and
    alpha patterns; biases. PEFT's own forward runs, decided per layer and per call, for DoRA and
    other variants, several active adapters, merged or disabled adapters, a trainable base, adapters in another
    dtype than the input outside of autocast, 4-bit bases with another 16-bit compute dtype than the run, hooks on parts
    of the layer or on every module, parametrized weights, evaluation without gradients.

    On CUDA, frozen weights that are 4-bit, or in another dtype than `compute_dtype`, are kept as copies in the compute
    dtype if all copies fit an eighth of the free device memory.

    Args:
        model: a PEFT model, or any module that contains PEFT LoRA layers.
        compute_dtype: the autocast dtype of the run, e.g. ``torch.bfloat16`` under ``bf16=True``; None without
            autocast.

    Returns:
        The report, whose `LoraReport.revert` restores the model.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `compute_dtype` is not a floating dtype.
    """
    return make_fast(model, compute_dtype)


def make_fast(model: nn.Module, compute_dtype: torch.dtype | None, *, copies: bool = True) -> LoraReport:
    """Do as `apply_lora`; `copies=False` keeps no copies of frozen weights."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_lora({short_repr(model)}): give the model that get_peft_model returned")
    if not (compute_dtype is None or (isinstance(compute_dtype, torch.dtype) and compute_dtype.is_floating_point)):
        raise ValueError(
            f"compute_dtype={short_repr(compute_dtype)} must be a floating dtype such as torch.bfloat16, or None"
        )
    report = LoraReport()
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            if isinstance(module, FastLora):
                report.already += 1
            elif hasattr(module, "parameter_name"):  # PEFT's ParamWrapper
                report.on_parameters.append(name)
            elif reason := first_reason(_why_not(module, compute_dtype)):
                report.handed_over.setdefault(reason, []).append(name)
            else:
                stock: Any = type(module)
                module.__class__ = _fast_class(stock)
                module.__dict__["fastpack_hooked"] = PartsHooked()
                undo.callback(_restore, module, stock)
                declined.pop(module, None)
                report.fast.append(name)
                report.modules.append(module)
        if copies:
            report.copies = keep_copies(report.modules, compute_dtype)
        has_backbone = bool(report.fast) and hasattr(text_model(model), "get_input_embeddings")
        if has_backbone:  # which tells where a forward begins
            report.siblings = find_siblings(report.fast, report.modules, kept := Kept())
        for backbone in backbones(model) if has_backbone else []:
            report._casts.append(CastHook(report.modules, backbone, kept.begin))
            undo.callback(backbone.register_forward_pre_hook(report._casts[-1]).remove)
        report._undo = undo.pop_all()
    return report


def _restore(layer: Any, stock: Any) -> None:
    layer._fastpack_drop_copy()
    layer.__dict__.pop("fastpack_cast", None)
    layer.__dict__.pop("fastpack_siblings", None)
    # FSDP 2 subclasses the class of a module that it shards separately; that class stays.
    if type(layer) is _fast_class(stock):
        layer.__class__ = stock
        layer.__dict__.pop("fastpack_hooked", None)


def _why_not(module: Any, compute_dtype: torch.dtype | None) -> Iterator[object]:
    """Yield why this LoRA layer runs PEFT's code instead of the fast forward."""
    kind, base, base_kind = type(module), module.base_layer, type(module.base_layer)
    known = kind is LoraLinear or (kind.__name__ in _QUANTIZED and kind.__module__.endswith("lora.bnb"))
    yield not known and f"lora.{kind.__name__}"
    known = base_kind in (nn.Linear, Conv1D) or base_kind.__name__ in _QUANTIZED
    yield not known and f"base of type {base_kind.__name__}"
    variants = {type(variant).__name__.removesuffix("LinearVariant") for variant in module.lora_variant.values()}
    yield ", ".join(sorted(variants)).replace("Dora", "DoRA")
    yield is_hooked(base) and "hooks on the base layer"
    if base_kind.__name__ == "Linear4bit" and compute_dtype is not None:
        if compute_dtype is torch.bfloat16 and emulates_bf16(base.weight.device):
            yield "bf16 is emulated on this device, where bitsandbytes has kernels in fp16; fp16=True would be fast"
        if base.compute_dtype not in (None, compute_dtype, torch.float32):
            yield f"bnb_4bit_compute_dtype={base.compute_dtype} in a run in {compute_dtype}; set it to that dtype"
    of = type(base.weight.data)
    other = kind is LoraLinear and of not in (Tensor, FakeTensor) and not is_sharded(base.weight)
    yield other and f"weights of type {of.__name__}"
