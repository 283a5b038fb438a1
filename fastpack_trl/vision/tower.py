"""The attention modules of a model's towers: which ones are found, proven equal to one call, and switched to it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from fastpack_trl.layers.forms import Precision
from fastpack_trl.layers.proof import Case, prove
from fastpack_trl.model.changes import patch_attribute, shared
from fastpack_trl.model.facts import text_model
from fastpack_trl.vision.attention import CALLS, NAME, STOCK
from fastpack_trl.vision.lengths import forget, lengths_of, made_on_host

ENDS = "cu_seqlens"
_LENGTHS = (1, 7, 4, 12)
_SHARED = "transformers.vision_utils"
"""Home of the functions that make ends, positions and windows from grids; older versions make them in the tower."""


@dataclass
class VisionTower:
    """What runs in one call.

    Attributes:
        found, switched: number of attention modules.
        path: ``one call per layer``, or ``one call per image`` where no kernel takes all.
        reasons: why modules of a class run their own code.
    """

    path: str
    found: int = 0
    switched: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> str:
        """Return ``31 of 32 layers (RadioAttention: it has a replaced forward)``."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return f"{self.switched} of {self.found} layers" + f" ({reasons})" * bool(reasons)


def tower_attention(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the attention modules outside of the decoder that get ends of images, and the tower of each."""
    base = text_model(model)
    text = base.config.get_text_config()
    towers: dict[nn.Module, Any] = {}
    for tower in base.modules():  # outermost first
        for module in tower.modules() if isinstance(tower, PreTrainedModel) else ():
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
    half = weight.is_cuda and precision.dtype in (torch.bfloat16, torch.float16)
    report = VisionTower("one call per layer" if half else "one call per image, lengths read once per batch")
    kinds: dict[Any, list[Any]] = {}
    for module in towers:
        kinds.setdefault((type(module), id(module.config)), []).append(module)
    with ExitStack() as stack:
        for modules in kinds.values():
            report.found += len(modules)
            own = modules[0].config
            switched = copy.copy(own)
            refused = _refusal(own, modules)
            # Also on the copy, so that nothing that has kept it finds our name after the run.
            stack.enter_context(patch_attribute(switched, "_attn_implementation_internal", NAME))
            if reason := refused or _proof(type(modules[0]), own, switched, precision):
                report.reasons.setdefault(type(modules[0]).__name__, reason)
                continue
            report.switched += len(modules)
            for module in modules:
                stack.enter_context(patch_attribute(module, "config", switched))
            for cls in (type(modules[0]), type(towers[modules[0]])):
                home = sys.modules[inspect.unwrap(cls.forward).__module__]
                stack.enter_context(shared(home, "_fastpack_lengths", partial(_host_lengths, home)))
        stack.callback(forget)
        yield report


def _refusal(config: Any, modules: list[Any]) -> str:
    if config._attn_implementation != STOCK:
        return f"attn_implementation={config._attn_implementation!r}"
    return "it has a replaced forward" if any("forward" in vars(module) for module in modules) else ""


@contextmanager
def _host_lengths(home: Any) -> Iterator[None]:
    """Let a modelling file make what it needs of grids on the host, and take the longest segment from there."""
    with ExitStack() as stack:
        for name, function in list(vars(home).items()):
            if inspect.isfunction(function) and function.__module__ == _SHARED:
                stack.enter_context(patch_attribute(home, name, made_on_host(function)))
        if own := vars(home).get("get_max_seqlen"):
            stack.enter_context(patch_attribute(home, "get_max_seqlen", _longest(own)))
        yield


def _longest(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def longest(cu_seqlens: Tensor, config: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen") -> Any:
        given = kwargs is not None and kwargs.get(kwarg_name) is not None
        if given or config._attn_implementation != NAME:
            return own(cu_seqlens, config, kwargs, kwarg_name)
        return max(lengths_of(cu_seqlens))

    return longest


def _proof(cls: Any, config: Any, switched: Any, precision: Precision) -> str:
    """Return why a class may not run in one call; empty if forward and gradients equal its own, also on the device."""
    devices = [precision.device] if precision.device.type == "cuda" else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            forms = list(_forms(_probe(cls, config, torch.device("cpu"))))
            for device in dict.fromkeys((torch.device("cpu"), precision.device)):
                where, probe = replace(precision, device=device), _probe(cls, config, device)
                forms = [form for form in forms if device.type != "cpu" or _runs(probe, form, where)][:1]
                if not forms:
                    return "its inputs are not those of a known tower"
                if reason := _differs(probe, switched, forms[0], where):
                    return reason
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code of others raises
            return f"a trial raises {type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _probe(cls: Any, config: Any, device: torch.device) -> Any:
    with device:
        return cls(config, **({"layer_idx": 0} if "layer_idx" in inspect.signature(cls).parameters else {})).eval()


class _Form(NamedTuple):
    """Shapes of what a forward takes besides the ends: hidden states, and cosines and sines or angles."""

    hidden: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...] = ()

    def call(self, probe: Any, config: Any, x: Tensor, *rest: Tensor) -> Any:
        """Call a probe under a config with its parameters and rotations, `rest`; return its output."""
        names = [name for name, _ in probe.named_parameters()]
        weights, turns = dict(zip(names, rest, strict=False)), rest[len(names) :]
        takes = inspect.signature(probe.forward).parameters
        keywords: dict[str, Any] = {"max_seqlen": None} if "max_seqlen" in takes else {}
        keywords |= {"position_embeddings": turns if len(turns) > 1 else turns[0]} if turns else {}
        ends = torch.tensor((0, *_LENGTHS), device=x.device).cumsum(0, dtype=torch.int32)
        with patch_attribute(probe, "config", config):
            out = functional_call(probe, weights, (x,), {ENDS: ends, **keywords})
        return out[0] if isinstance(out, tuple) else out


def _forms(probe: Any) -> Iterator[_Form]:
    """Yield the shapes that a forward may take."""
    width = next(module.in_features for module in probe.modules() if hasattr(module, "in_features"))
    head, tokens = getattr(probe, "head_dim", None) or width // probe.num_heads, sum(_LENGTHS)
    turns = [*(((tokens, size),) * count for count in (2, 1) for size in (head, head // 2)), ()]
    yield from (_Form(hidden, turn) for hidden in ((tokens, width), (1, tokens, width)) for turn in turns)


def _case(probe: Any, form: _Form, where: Precision, dtype: torch.dtype) -> Case:
    turns = [where.draw(torch.float32, *shape) for shape in form.turns]
    weights = [p.detach().to(dtype) for p in probe.parameters()]  # the gradient of their input has those of q, k and v
    return Case([where.draw(dtype, *form.hidden)], [*weights, *turns], where.context)


def _runs(probe: Any, form: _Form, where: Precision) -> bool:
    case = _case(probe, form, where, torch.float32)
    try:
        return bool(form.call(probe, probe.config, *case.tensors, *case.constants).shape == form.hidden)
    except Exception:  # noqa: BLE001 - other shapes are tried
        return False


def _differs(probe: Any, switched: Any, form: _Form, where: Precision) -> str:
    cases, calls = [_case(probe, form, where, dtype) for dtype in where.dtypes()], list[int]()
    with patch_attribute(probe, CALLS, calls):
        form.call(probe, switched, *cases[0].tensors, *cases[0].constants)
    if calls != [len(_LENGTHS)]:
        return "its forward has no call with the ends of images"
    own, ours = partial(form.call, probe, probe.config), partial(form.call, probe, switched)
    found, reason, _ = prove(own, [[form]], lambda _: ours, cases)
    return "" if found else f"one call is not its loop: {reason}"
