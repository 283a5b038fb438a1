"""The fused forms that a class may equal, their proof, and the call that replaces its forward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastpack_trl.kernels.fused_form import GatedForm, NormForm, RotaryForm
from fastpack_trl.kernels.gated import gated
from fastpack_trl.kernels.norm import norm
from fastpack_trl.kernels.rotary import rotary
from fastpack_trl.layers.find import OWN, Kind, hooked_inside, linears
from fastpack_trl.layers.pending import Addend, PendingNorm, Sum, active, running, tensor_of
from fastpack_trl.layers.proof import SCALES, Case, prove
from fastpack_trl.model.changes import hand_over
from fastpack_trl.model.facts import inside_peft
from fastpack_trl.model.hooks import PartsHooked

Call = Callable[..., Any]
"""What runs in place of a forward: ``call(module, own_forward, *args, **kwargs)``."""
_WIDTH, _INNER = 16, 512
"""Widths of an MLP in its proof; the kernels for the inner one are those of a step."""


@dataclass(frozen=True)
class Precision:
    """The numbers of a run.

    Attributes:
        dtype: that it computes in, by autocast or because weights have it.
        hidden: dtype of the embeddings, so of the residual.
        gathers: weights are sharded, and gathered in `dtype`.
    """

    dtype: torch.dtype
    autocast: bool
    device: torch.device
    hidden: torch.dtype
    gathers: bool = False

    def context(self) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        return torch.autocast(self.device.type, self.dtype) if self.autocast else nullcontext()

    @property
    def searches(self) -> bool:
        """Formulas are told apart on the CPU, in fp32 too; a device proves one in the dtypes of the run."""
        return self.device.type == "cpu"

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that tensors of a step may have."""
        exact = [torch.float32] * self.searches
        return _strictest_first({*exact, self.dtype, self.hidden})

    def draw(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        """Return random numbers, the same on every device."""
        return (torch.randn(*shape) * scale).to(self.device, dtype)


def _strictest_first(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def accept(kind: Kind, precision: Precision) -> tuple[Call | None, str]:
    """Return the call that replaces the forward of a kind, or None and the reason."""
    devices = [precision.device] if precision.device.type == "cuda" else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
        return {"norm": _norm, "gate": _gate, "rotary": _rotary}[kind.part](kind, precision)


def _prove(trial: Callable[..., Any], forms: Any, precision: Precision, probe: Any) -> tuple[Any, str, list[Case]]:
    """Find the form by the twins on the CPU, in fp32 too, and prove its kernel on the device, in the run's dtypes.

    Only what a step runs is compiled for the device. A probe is a module, which must be equal in both of its modes.
    """
    cpu = replace(precision, device=torch.device("cpu"))
    torch.manual_seed(0)
    form, reason, cases = trial(cpu, forms)
    if form is not None and probe is not None:
        probe.eval()
        torch.manual_seed(0)
        form, reason, cases = trial(cpu, [[form]])
        probe.train()
    if form is not None and precision.device.type != "cpu":
        torch.manual_seed(0)
        form, reason, cases = trial(precision, [[form]])
    return form, reason, cases


def _norm(kind: Kind, precision: Precision) -> tuple[Call | None, str]:
    module = kind.modules[0]
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    names = sorted(parameters, key=lambda name: "bias" in name or "beta" in name)
    width = max([*map(len, parameters.values()), *getattr(module, "normalized_shape", ())] or [_INNER])
    if len(names) > 2 or any(len(p) != width for p in parameters.values()):
        return None, "its parameters are not a weight and a bias of one width"
    pair = (*names, None, None)[:2]
    probe = copy.deepcopy(module, {id(p): p for p in parameters.values()}).train()

    def own(x: Tensor, *values: Tensor) -> Any:
        return functional_call(probe, dict(zip(names, values, strict=True)), (x,))

    def fused(form: NormForm) -> Callable[..., Tensor]:
        return lambda x, weight=None, bias=None: norm(x, weight, bias, form)

    trained = any(p.requires_grad for each in kind.modules for p in each._parameters.values() if p is not None)

    def trial(where: Precision, forms: Any) -> tuple[NormForm | None, str, list[Case]]:
        kept = {p.dtype for p in parameters.values()} | set(where.dtypes() if where.searches else ())
        stored = _strictest_first(kept | ({where.dtype} if where.gathers else set())) if names else [None]
        differentiated = len(names) if trained or where.searches else 0  # a kernel without sums runs for frozen ones
        cases = []
        for x, w, scale in itertools.product(where.dtypes(), stored, SCALES):
            row = where.draw(x, 2, 3 if where.searches else 16, width, scale=scale)
            weights = [where.draw(w, width) for _ in names]
            tensors = [row, *weights[:differentiated]]
            cases.append(Case(tensors, weights[differentiated:], where.context))
        if where.autocast and not where.searches:  # CUDA's autocast runs torch's layer norm in fp32, a CPU's does not
            forms = [[form, *[replace(form, widens=True)] * form.centers] for (form,) in forms]
        return prove(own, forms, fused, cases)

    form, reason, cases = _prove(trial, _norm_forms(module, bool(names)), precision, probe)
    if form is None:
        return None, reason
    return NormCall(
        form, pair, frozenset(tuple(t.dtype for t in (*case.tensors, *case.constants)) for case in cases)
    ), ""


@dataclass(frozen=True, slots=True)
class NormCall:
    """Runs the norm of a module, or puts it off if it is of heads and the attention that runs rotates them.

    Attributes:
        names: of weight and bias; None for one that the class does not have.
        proven: dtypes of the input, of the weight and of the bias.
    """

    form: NormForm
    names: tuple[str | None, str | None]
    proven: frozenset[tuple[torch.dtype, ...]]

    def __call__(self, module: Any, forward: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        weight, bias = (module._parameters.get(name) for name in self.names)
        total, x = (x, x.x) if isinstance(x, Sum) else (None, tensor_of(x))
        given = [x] if weight is None else [x, weight] if bias is None else [x, weight, bias]
        if (
            args or kwargs or not isinstance(x, Tensor) or tuple(t.dtype for t in given) not in self.proven
            or any(t.shape != x.shape[-1:] for t in given[1:])
            or (self.form.widens and not torch.is_autocast_enabled(x.device.type))
        ):  # fmt: skip
            x = x if total is None else total.tensor
            return forward(module, *(() if x is None else (x,)), *args, **kwargs)
        if total is not None:
            return total.normed(weight, bias, self.form)
        if module in active.norms and x.dim() == 4 and self.form.out_dtype(x, weight) == x.dtype:
            return PendingNorm(x, weight, self.form, moved=x.stride(1) < x.stride(2))  # heads come before tokens
        return norm(x, weight, bias, self.form)

    def is_of_heads(self, module: Any) -> bool:
        """Return whether a rotation can take it over."""
        weight = module._parameters.get(self.names[0])
        return weight is not None and self.names[1] is None and not self.form.centers


def _norm_forms(module: Any, has_weight: bool) -> Iterator[list[NormForm]]:
    """Yield the forms that a norm may have in groups, of which the first that proves equal is taken."""
    known = [v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1]
    epsilons = dict.fromkeys([*known, 1e-6, 1e-5])
    casts = ((True, True), (False, False), (False, True)) if has_weight else ((False, False),)
    for form in itertools.product(epsilons, (False, True), (0, 1) if has_weight else (0,)):
        yield [NormForm(*form, *cast) for cast in casts]


class _Projection(nn.Module):
    """Stands for a projection of an MLP in its proof: each output is one input times a number."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs))
        self.times, self.dtype, self.keeps = -(-outputs // inputs), dtype, False

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([x] * self.times, -1)[..., : len(self.weight)] * self.weight.to(x.dtype)
        return out.to(self.dtype) if torch.is_autocast_enabled(x.device.type) and not self.keeps else out


def _keeps_dtype(projection: Any) -> bool:
    """Return whether a projection has its input's dtype under autocast, too, as those of bitsandbytes have."""
    return type(inside_peft(projection)).__name__ in ("Linear4bit", "Linear8bitLt")


def _gate(kind: Kind, precision: Precision) -> tuple[Call | None, str]:
    module = kind.modules[0]
    *inward, down = linears(module)
    both = len(inward) == 1
    stubs = {name: _Projection(_WIDTH, _INNER * (1 + both), precision.dtype) for name in inward}
    stubs[down] = _Projection(_INNER, _WIDTH, precision.dtype)
    others = [value for value in vars(module).values() if hasattr(value, "to_dict")]  # configs
    probe = copy.deepcopy(module, {id(module._modules[n]): s for n, s in stubs.items()} | {id(c): c for c in others})
    probe.train()
    weights = [f"{name}.weight" for name in stubs]

    def own(x: Tensor, *values: Tensor) -> Any:
        return functional_call(probe, dict(zip(weights, values, strict=True)), (x,))

    def fused(found: tuple[list[str], GatedForm]) -> Callable[..., Tensor]:
        names, form = found

        def run(x: Tensor, *values: Tensor) -> Tensor:
            named = dict(zip(stubs, values, strict=True))
            project = {n: lambda x, n=n: functional_call(stubs[n], {"weight": named[n]}, (x,)) for n in stubs}
            return project[down](gated(project[names[0]](x), None if both else project[names[1]](x), form))

        return run

    keeps = precision.autocast and any(_keeps_dtype(each._modules[name]) for each in kind.modules for name in inward)

    @contextmanager
    def context(where: Precision, keep: bool) -> Iterator[None]:
        for stub in stubs.values():
            stub.keeps = keep
        with where.context():
            yield

    def trial(where: Precision, forms: Any) -> tuple[Any, str, list[Case]]:
        cases = [
            Case([where.draw(dtype, 2, 16, _WIDTH, scale=scale)],
                 # As the run stores them: their rounding is no error.
                 [where.draw(where.dtype, len(stub.weight)).float() for stub in stubs.values()],
                 partial(context, where, keep))
            for dtype, keep, scale in itertools.product(where.dtypes(), {False, keeps}, SCALES)
        ]  # fmt: skip
        return prove(own, forms, fused, cases)

    found, reason, _ = _prove(trial, _gate_forms(inward), precision, probe)
    if found is None:
        return None, reason
    (first, *second), form = found
    proven = frozenset({precision.dtype, *precision.dtypes()} if keeps or not precision.autocast else {precision.dtype})
    unfit = set[torch.dtype]()  # of inputs: a call would project them twice

    def made_in(x: Tensor) -> torch.dtype:
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

    def call(self: Any, forward: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if (
            args or kwargs or not isinstance(x, Tensor) or hooked_inside(self) or made_in(x) not in proven
            or x.dtype in unfit
        ):  # fmt: skip
            return forward(self, *(() if x is None else (x,)), *args, **kwargs)
        parts = self._modules
        values = {name: parts[name](x) for name in inward}  # in the order of the model
        gate, up = values[first], values[second[0]] if second else None
        if gate.dtype not in proven or (up is not None and up.dtype != gate.dtype):
            unfit.add(x.dtype)
            hand_over(self, "fused_layers", f"{kind.name}: its projections return {gate.dtype} for {x.dtype}")
            return forward(self, x)
        return parts[down](gated(gate, up, form))

    return call, ""


def _gate_forms(inward: list[str]) -> Iterator[list[tuple[list[str], GatedForm]]]:
    forms = [GatedForm("silu"), *(GatedForm(act) for act in ("gelu_tanh", "gelu", "relu2", "relu"))]
    for form in (*forms, GatedForm("silu", 1.702)):
        if len(inward) == 2:
            yield from ([(inward, form)], [(inward[::-1], form)])
        else:
            yield from ([(inward, form)], [(inward, replace(form, up_first=True))])


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """Runs an attention layer, whose rotations by name are fused and may take over `norms` of its heads."""

    turns: dict[str, Callable[..., Any]]
    norms: tuple[nn.Module, ...] = ()
    after: tuple[nn.Module, ...] = ()
    """Norms of the layer around it, one of which may take the sum of the output and the residual into its kernel."""
    hooked: PartsHooked = field(default_factory=PartsHooked)
    """Whether a hook on one of them needs a tensor."""

    def __call__(self, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.hooked(module, *self.norms, *self.after):
            with running(self.turns, ()):
                return forward(module, *args, **kwargs)
        with running(self.turns, self.norms):
            out = forward(module, *args, **kwargs)
        if len(self.after) < 2:  # a layer that ends with the attention has a norm before it only
            return out
        if isinstance(out, Tensor):
            return Addend(out)
        return (Addend(out[0]), *out[1:]) if type(out) is tuple and isinstance(out[0], Tensor) else out


def _rotary(kind: Kind, precision: Precision) -> tuple[Call | None, str]:
    turns, width = {}, getattr(kind.modules[0], "head_dim", None)
    for home, name in kind.rotary:
        own = vars(home)[name]
        own = OWN.get(own, own)  # another model may be fused
        columns = width if isinstance(width, int) else 64
        turns[name], reason = _turn(own, precision, columns)
        if reason and (flat := _flat_turn(own, precision, columns)) is not None:
            turns[name] = flat
        elif reason:
            return None, f"{name}: {reason}"
    return RotaryCall(turns), ""


def _flat_turn(own: Any, precision: Precision, width: int) -> Any:
    """Return the turn of a tower: q and k are (tokens, heads, dim), cos and sin (tokens, columns); None if unproven."""

    def batched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        flat = (x[0].transpose(0, 1) for x in (q, k))
        return tuple(x.transpose(0, 1)[None] for x in own(*flat, cos[0], sin[0]))

    turn, reason = _turn(batched, precision, width, batch=1)

    def turn_flat(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        q, k = tensor_of(q), tensor_of(k)
        if not all(isinstance(t, Tensor) for t in (q, k, cos, sin)) or (q.dim(), k.dim(), cos.dim()) != (3, 3, 2):
            return own(q, k, cos, sin)
        turned = turn(*(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None])
        return tuple(x[0].transpose(0, 1) for x in turned)

    return None if reason else turn_flat


def _turn(own: Any, precision: Precision, width: int, batch: int = 2) -> tuple[Any, str]:
    reasons, forms = list[str](), {}
    # Some families keep cos and sin in fp32.
    pairs = list(itertools.product(precision.dtypes(), {*precision.dtypes(), torch.float32}))

    def fused(form: RotaryForm) -> Callable[..., Any]:
        return lambda q, k, cos, sin: rotary(q, k, cos, sin, form)

    def trial(where: Precision, candidates: Any) -> tuple[RotaryForm | None, str, list[Case]]:
        cases = [
            Case([where.draw(q, batch, 5, heads, width, scale=scale).transpose(1, 2) for heads in (16, 8)],
                 [where.draw(c, batch, 5, columns) for _ in range(2)], where.context)
            for q, c, scale in itertools.product(where.dtypes(), where.dtypes(), SCALES)
        ]  # fmt: skip
        return prove(own, candidates, fused, cases)

    for columns in (width, width // 2):  # the second: partial rotation, or half of the columns
        forms[columns], reason, _ = _prove(trial, _rotary_forms(narrow=columns < width), precision, None)
        reasons.append(reason)
    if not any(forms.values()):
        return None, reasons[0]

    def turn(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        norms = [each for each in (q, k) if isinstance(each, PendingNorm)]
        if (
            not all(isinstance(t, Tensor | PendingNorm) for t in (q, k, cos, sin))
            or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3)
            or (form := forms[width if cos.shape[-1] == q.shape[-1] else width // 2]) is None
            or (q.dtype, cos.dtype) not in pairs or cos.shape != sin.shape or cos.requires_grad
            or (q.dtype, q.shape[-1], cos.dtype) != (k.dtype, k.shape[-1], sin.dtype)
            or not q.shape[2] == k.shape[2] == cos.shape[1] or cos.shape[0] not in (1, q.shape[0])
            or q.shape[0] != k.shape[0] or (form.narrow and 2 * cos.shape[-1] != q.shape[-1])
        ):  # fmt: skip
            return own(tensor_of(q), tensor_of(k), cos, sin)
        if len(norms) == 2 and q.form == k.form:
            return rotary(q.x, k.x, cos, sin, form, q.form, q.weight, k.weight)
        return rotary(tensor_of(q), tensor_of(k), cos, sin, form)

    return turn, ""


def _rotary_forms(*, narrow: bool) -> Iterator[list[RotaryForm]]:
    styles: list[tuple[Any, Any]] = [("half", "half"), ("pairs", "pairs"), ("pairs", "half")]
    kinds = [(columns, False) for columns in ("half", "pairs", "first")] + [("first", True)] * narrow
    flags = list(itertools.product((True, False), (False, True)))
    for (reads, writes), (columns, is_narrow), (promotes, dense) in itertools.product(styles, kinds, flags):
        yield [RotaryForm(reads, writes, columns, is_narrow, promotes, dense)]  # type: ignore[arg-type]
