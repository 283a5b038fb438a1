"""Whether the rows of a run may hold what documents begin with alike once, and the check that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.interface import Backend
from fastpack_trl.attention.proof import verify_shared
from fastpack_trl.errors import first_reason
from fastpack_trl.model import facts
from fastpack_trl.run import Choice, Run


class _Examined(NamedTuple):
    """The outcome of the last check of a run, and of what it was."""

    choice: Choice
    model: ref[Any]
    reason: str


def why_not_shared(run: Run) -> str:
    """Return why rows of a run cannot hold a shared prefix once, by its model and its attention; empty if they can.

    To be asked while the attention is installed. The check runs once per attention and model; with
    ``verify_packing="off"`` it does not.
    """
    attention, model = run.part(PackedAttention), run.model
    backend = BACKENDS.get(run.choice.path)
    if attention is None or backend is None:
        return f"{run.attention_path} has no form for rows that hold a shared prefix once"
    found = first_reason(_refusals(run, attention, backend))
    if found or run.settings.verify_packing == "off":
        return found
    examined = run.part(_Examined)
    if examined is None or (examined.choice, examined.model()) != (run.choice, model):
        examined = _Examined(run.choice, ref(model), _failure(run, attention))
        run.keep(examined)
    return examined.reason


def _refusals(run: Run, attention: PackedAttention, backend: Backend) -> Iterator[object]:
    yield backend.refuses_shared(attention.features)
    yield run.is_sharded and "parameters are sharded: the proof of shared prefixes needs them whole"
    states = facts.state_modules(run.model)
    yield states and f"{type(states[-1]).__name__} carries state along the row"
    yield facts.is_prompt_learning(run.model) and "prompt learning puts virtual tokens before each document"
    yield facts.is_invoked_once_per_row(run.model) and facts.ALORA
    dropout = max(_dropouts(run.model), default=attention.features.dropout)
    yield dropout and f"dropout {dropout:g} would drop the same of a prefix for all documents: 0 shares them"
    noise = getattr(facts.text_model(run.model).config.get_text_config(), "router_jitter_noise", 0.0)
    yield noise and f"router_jitter_noise {noise:g} would be the same on a prefix for all documents"


def _dropouts(model: nn.Module) -> Iterator[float]:
    """Yield the rates above 0 of modules that drop, and of those that call a function for it."""
    for module in model.modules():
        rates = [module.p] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        rates += [value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        yield from (rate for rate in rates if rate > 0)


def _failure(run: Run, attention: PackedAttention) -> str:
    try:
        with run.step.taking("proof"), run.autocast():
            proof = verify_shared(run.model, attention)
    except (*facts.UNREADABLE, ImportError) as error:
        return f"the proof of shared prefixes cannot run on this model: {type(error).__name__}: {error}"
    return "" if proof.proven else f"{attention.path} failed its proof of shared prefixes: {proof}"
