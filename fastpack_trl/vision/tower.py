"""The attention modules of a model's towers: which ones are found, proven equal to one call, and switched to it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, PreTrainedModel

from fastpack_trl.layers.forms import Precision
from fastpack_trl.layers.proof import Case, prove
from fastpack_trl.model.changes import patch_attribute, shared
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.walk import modules_of
from fastpack_trl.vision.attention import CALLS, HALF, NAME, STOCK, segment_attention
from fastpack_trl.vision.lengths import lengths_of, made_on_host

ENDS = "cu_seqlens"
_LENGTHS = (1, 7, 4, 12)


@dataclass
class VisionTower:
    """What runs in one call: where, how many attention modules of those found, and why others run their own code."""

    path: str
    found: int = 0
    switched: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.switched} of {self.found} layers" + f" ({reasons})" * bool(reasons)


def tower_attention(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the attention modules outside of the decoder that get ends of images, and the tower of each."""
    base = text_model(model)
    text = base.config.get_text_config()
    towers: dict[nn.Module, Any] = {}
    for tower in modules_of(base):  # outermost first
        for module in modules_of(tower) if isinstance(tower, PreTrainedModel) else ():
            cls: Any = type(module)
            if getattr(module, "config", text) is not text and _takes_ends(cls):
                towers[module] = tower
    return towers


@functools.cache
def _takes_ends(cls: Any) -> bool:
    forward = inspect.unwrap(cls.forward)
    takes = inspect.isfunction(forward) and ENDS in inspect.signature(forward).parameters
    return takes and "ALL_ATTENTION_FUNCTIONS" in inspect.getclosurevars(forward).globals


@contextmanager
def one_call_towers(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[VisionTower]:
    """Run the attention of the towers of `model` in one call per layer, where its class proves equal.

    A module gets a copy of its config that names our attention: no other module sees it, and hooks run as before.

    Args:
        dtype: of autocast; None: the run computes in the dtype of the weights.
    """
    towers = tower_attention(model)
    weight = next((p for m in towers for p in m.parameters() if p.is_floating_point()), torch.empty(0))
    precision = Precision(dtype or weight.dtype, dtype is not None, weight.device, weight.dtype)
    is_one = weight.is_cuda and precision.dtype in HALF
    report = VisionTower("one call per layer" if is_one else "one call per image", len(towers))
    kinds: dict[Any, list[Any]] = {}
    for module in towers:
        kinds.setdefault((type(module), id(module.config)), []).append(module)
    # The name remains registered: a copy of a model that is made meanwhile keeps working.
    AttentionInterface.register(NAME, segment_attention)
    with ExitStack() as stack:
        for (cls, _), modules in kinds.items():
            own, switched = modules[0].config, copy.copy(modules[0].config)
            # Restored too: what has kept the copy does not find our name after the run.
            stack.enter_context(patch_attribute(switched, "_attn_implementation_internal", NAME))
            reason = own._attn_implementation != STOCK and f"attn_implementation={own._attn_implementation!r}"
            reason = reason or (any("forward" in vars(each) for each in modules) and "it has a replaced forward")
            if reason := reason or _proof(cls, own, switched, precision):
                report.reasons.setdefault(cls.__name__, reason)
                continue
            report.switched += len(modules)
            for module in modules:
                stack.enter_context(patch_attribute(module, "config", switched))
            for part in (cls, type(towers[modules[0]])):
                home = sys.modules[inspect.unwrap(part.forward).__module__]
                stack.enter_context(shared(home, "_fastpack_lengths", partial(_host_lengths, home)))
        yield report


@contextmanager
def _host_lengths(home: Any) -> Iterator[None]:
    """Let a modelling file make what it needs of grids on the host, and take the longest segment from there.

    Versions of transformers without these functions make ends in the tower, whose lengths are read once each.
    """
    with ExitStack() as stack:
        for name, function in list(vars(home).items()):
            if inspect.isfunction(function) and function.__module__ == "transformers.vision_utils":
                stack.enter_context(patch_attribute(home, name, made_on_host(function)))
        if own := vars(home).get("get_max_seqlen"):

            def longest(ends: Tensor, config: Any, *args: Any, **kwargs: Any) -> Any:
                ours = config._attn_implementation == NAME
                return max(lengths_of(ends)) if ours else own(ends, config, *args, **kwargs)

            stack.enter_context(patch_attribute(home, "get_max_seqlen", longest))
        yield


def _proof(cls: Any, own: Any, switched: Any, precision: Precision) -> str:
    """Return why a class may not run in one call; empty if forward and gradients equal its own, also on the device."""
    reason, devices = "", [precision.device] if precision.device.type == "cuda" else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            for device in dict.fromkeys((torch.device("cpu"), precision.device)):
                with torch.autocast(device.type, enabled=False):
                    reason = reason or _difference(cls, own, switched, replace(precision, device=device))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code of others raises
            return f"a trial raises {type(error).__name__}: {error}".partition("\n")[0]
    return reason


def _difference(cls: Any, own: Any, switched: Any, where: Precision) -> str:
    """Compare a fresh module under both configs, with the first shapes of rotations that its own forward takes."""
    with where.device:
        probe = cls(own, **({"layer_idx": 0} if "layer_idx" in inspect.signature(cls).parameters else {})).eval()
    names, tokens = [name for name, _ in probe.named_parameters()], sum(_LENGTHS)
    width = next(module.in_features for module in probe.modules() if hasattr(module, "in_features"))
    head = getattr(probe, "head_dim", None) or width // probe.num_heads
    ends = torch.tensor((0, *_LENGTHS), device=where.device).cumsum(0, dtype=torch.int32)
    takes = {"max_seqlen": None} if "max_seqlen" in inspect.signature(cls.forward).parameters else {}

    def call(config: Any, x: Tensor, *rest: Tensor) -> Any:
        turns = rest[len(names) :]
        keywords = {"position_embeddings": turns if len(turns) > 1 else turns[0]} if turns else {}
        with patch_attribute(probe, "config", config):
            weights = dict(zip(names, rest, strict=False))
            out = functional_call(probe, weights, (x,), {ENDS: ends, **takes, **keywords})
        return out[0] if isinstance(out, tuple) else out

    turns = [*(((tokens, size),) * count for count in (2, 1) for size in (head, head // 2)), ()]
    for hidden, shapes in ((h, t) for h in ((tokens, width), (1, tokens, width)) for t in turns):
        cases, calls = list[Case](), list[int]()
        for dtype in where.dtypes():
            constants = [p.detach().to(dtype) for p in probe.parameters()]
            constants += [where.draw(torch.float32, *shape) for shape in shapes]
            cases.append(Case([where.draw(dtype, *hidden)], constants, where.context))
        with patch_attribute(probe, CALLS, calls):
            _, reason, ran = prove(partial(call, own), [[call]], lambda _: partial(call, switched), cases)
        if ran and set(calls) != {len(_LENGTHS)}:
            return "its forward has no call with the ends of images"
        if ran or not reason.startswith("its forward raises"):
            return f"one call is not its loop: {reason}" if reason else ""
    return "its inputs are not those of a known tower"
