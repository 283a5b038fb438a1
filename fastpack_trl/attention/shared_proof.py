"""Run-time proof of rows that hold a shared prefix once: no branch sees another, each sees what it goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.interface import Backend
from fastpack_trl.attention.probe import Probe
from fastpack_trl.attention.proof import PackingProof, budget_of
from fastpack_trl.errors import first_reason
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.packing.packed_batch import to_transformers_kwargs
from fastpack_trl.packing.prefixes import SharedRow, packed_batch
from fastpack_trl.run import Choice, Run

LENGTHS = (7, 6, 1, 5, 4, 9)
PARENTS = (-1, 0, 0, 0, 3, -1)
"""A prefix with three branches, one of them a single token and one that goes on, and a document beside them."""


class SharedProbe(Probe):
    """One row of random tokens in which documents go on from each other; `documents` are the whole ones.

    Attributes:
        paths: for each segment the tokens of the row from the beginning of its document to its own end.
    """

    def __init__(self, model: nn.Module, attention: PackedAttention, seed: int) -> None:
        super().__init__(model, attention, LENGTHS, seed)
        own = list(torch.arange(sum(LENGTHS)).split(LENGTHS))
        self.paths: list[Tensor] = []
        for tokens, parent in zip(own, PARENTS, strict=True):
            self.paths.append(tokens if parent < 0 else torch.cat([self.paths[parent], tokens]))
        self.documents = tuple(self.ids[0, path.to(self.ids.device)] for path in self.paths)
        lengths, tokens = np.array(LENGTHS), np.arange(sum(LENGTHS))
        before = np.array([len(path) for path in self.paths]) - lengths
        row = SharedRow(lengths, before, torch.cat(self.paths).numpy(), tokens, tokens)
        self.batch = packed_batch(row).to(self.ids.device)
        self.packed_keywords = to_transformers_kwargs(self.batch) | {"packed_batch": self.batch}

    def packed_losses(self, logits: Tensor) -> float:
        """Sum the losses of all documents, whose packed logits are those of their paths."""
        return sum(self.loss(index, logits[path.to(logits.device)]) for index, path in enumerate(self.paths))

    def separate_losses(self, *, by_ids: bool = False) -> float:
        """Sum the losses of the documents, each by itself."""
        assert not by_ids, "ids are examined in rows of whole documents"
        return sum(self.loss(index, self.separate(index, len(path))) for index, path in enumerate(self.paths))


def verify_shared(model: nn.Module, attention: PackedAttention, *, seed: int = 0) -> PackingProof:
    """Prove on a few tokens that documents of `model` may share what they begin with in a row.

    (1) The gradient of each segment's logits with respect to the embeddings of a segment that is not before it in its
    document is exactly zero. (2) With respect to those of the segment that it goes on from it is not. (3) The loss is
    that of the documents run one by one under stock attention.

    Runs as `verify_packing`, and raises as it.

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        attention: what `packed_attention` yielded for it, inside of its context.
        seed: of the probe's tokens.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated_run(model, training=False))
        probe = SharedProbe(model, attention, seed)
        leaf = probe.embed(probe.ids)
        try:
            row = probe.packed(leaf, sum(LENGTHS))
        finally:
            probe.batch.clear_derived()
        leaks, unseen = _dependences(probe, row, leaf, seed + 1)
        packed, separate = probe.packed_losses(row), probe.separate_losses()
    predictions = sum(len(path) - 1 for path in probe.paths)
    return PackingProof(
        path=attention.path,
        lengths=LENGTHS,
        leaks=tuple(leaks),
        packed_loss=packed / predictions,
        separate_loss=separate / predictions,
        budget=budget_of(model, separate / predictions),
        unseen=tuple(unseen),
    )


class _Examined(NamedTuple):
    """The outcome of the last proof of a run, and of what it was."""

    choice: Choice
    model: ref[Any]
    reason: str


def why_not_shared(run: Run) -> str:
    """Return why rows of a run cannot hold a shared prefix once, by its model and its attention; empty if they can.

    To be asked while the attention is installed. The proof runs once per attention and model; with
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


def _dependences(
    probe: SharedProbe, row: Tensor, leaf: Tensor, seed: int
) -> tuple[list[tuple[int, int, float]], list[tuple[int, int]]]:
    """Return the gradients that are not zero of segments on those outside of their path, and prefixes without one."""
    directions = torch.Generator().manual_seed(seed)
    leaks: list[tuple[int, int, float]] = []
    unseen: list[tuple[int, int]] = []
    for target, (segment, parent) in enumerate(zip(row.split(LENGTHS), PARENTS, strict=True)):
        direction = torch.randn(segment.shape, generator=directions).to(segment)
        (gradient,) = torch.autograd.grad((segment * direction).sum(), leaf, retain_graph=True)
        sizes = [float(part.abs().max()) for part in gradient[0].split(LENGTHS)]
        before = set(probe.paths[target].tolist())
        for source, (size, tokens) in enumerate(zip(sizes, torch.arange(len(row)).split(LENGTHS), strict=True)):
            if size != 0.0 and not before.issuperset(tokens.tolist()):  # a NaN is a leak too
                leaks.append((source, target, size))
        # Of a parent the last tokens may be all that a window leaves.
        if parent >= 0 and sizes[parent] == 0.0:
            unseen.append((parent, target))
    return leaks, unseen
