"""Run-time check that packed documents do not see each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fastpack_trl.attention import probe
from fastpack_trl.attention.install import PackedAttention, packed_attention
from fastpack_trl.attention.probe import Probe
from fastpack_trl.errors import NonFiniteError, PackingError
from fastpack_trl.model.changes import isolated_run, zeros_perturbed
from fastpack_trl.model.walk import parameters_of
from fastpack_trl.packing.documents import PADDED_DOCUMENTS

BUDGET = 2.0**-12
"""Largest relative difference of fp32 hidden states due to rounding; wrong positions or windows exceed it by far."""


@dataclass(frozen=True, slots=True)
class PackingProof:
    """Result of a packing check.

    Attributes:
        path: how documents were separated, e.g. ``per_document``; ``stock`` for transformers' attention.
        lengths: tokens of each document of the probe, or of each segment where documents share a prefix.
        leaks: ``(i, j, gradient)`` for every pair in which document j's hidden states depend on document i's
            embeddings, with the largest absolute gradient. Must be empty.
        difference: the largest relative difference (of norms) of a document's hidden states, packed and by itself.
        budget: the largest allowed value; None if it is only reported (below fp32, and in TF32).
        not_exercised: windows that no document of the probe exceeds.
        windows: ``(layer, packed, separate)`` for every attention layer whose last token of a document sees another
            number of tokens in the packed row than in the document by itself. Must be empty.
        unseen: ``(i, j)`` for every segment j that continues segment i but does not depend on it. Must be empty.
    """

    path: str
    lengths: tuple[int, ...]
    leaks: tuple[tuple[int, int, float], ...]
    difference: float
    budget: float | None
    not_exercised: tuple[str, ...] = ()
    windows: tuple[tuple[str, int, int], ...] = ()
    unseen: tuple[tuple[int, int], ...] = ()

    @property
    def proven(self) -> bool:
        within = self.budget is None or self.difference <= self.budget
        return within and not (self.leaks or self.windows or self.unseen)

    def __str__(self) -> str:
        if self.leaks:
            source, target, size = max(self.leaks, key=lambda leak: leak[2])
            pairs = len(self.lengths) * (len(self.lengths) - 1)
            depends = f"document {target} depends on document {source}"
            return f"LEAK: {len(self.leaks)} of {pairs} pairs; {depends} ({size:.2g})"
        if self.windows:
            layer, packed, separate = self.windows[0]
            return (
                f"WINDOW: attention layers that see another number of tokens than in separate documents: "
                f"{len({name for name, *_ in self.windows})}; {layer} sees {packed}, not {separate}"
            )
        if self.unseen:
            return f"UNSEEN: segment {self.unseen[0][1]} does not depend on segment {self.unseen[0][0]} before it"
        bound = "no limit" if self.budget is None else f"limit {self.budget:.1e}"
        skipped = f"; not exercised: {', '.join(self.not_exercised)}" if self.not_exercised else ""
        verdict = "passed: documents are isolated" if self.proven else "FAILED: packed rows differ from documents alone"
        return f"{verdict} (difference {self.difference:.1e}, {bound}){skipped}"

    def raise_if_failed(self, remedy: str = "") -> PackingProof:
        """Return self; raise `PackingError` for a leak, a wrong window or a difference over the budget.

        The message names the `remedy`; default: the setting that avoids the failure.
        """
        if self.proven:
            return self
        fallback = "set packed_attention='auto'" if self.path == "stock" else "set packing=False"
        raise PackingError(f"packing check with {self.path}: {self}; {remedy or fallback}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "proven": self.proven}


def verify_packing(
    model: nn.Module,
    *,
    implementation: str = "auto",
    lengths: Sequence[int] | None = None,
    attention: PackedAttention | None = None,
    seed: int = 0,
) -> PackingProof:
    """Check on a few tokens that no packed document of `model` depends on another.

    (1) For every pair i != j the gradient of document j's hidden states with respect to document i's input embeddings
    is exactly zero. (2) In fp32 the hidden states are those of the documents run one by one under transformers'
    attention. (3) In a model with windows each attention layer sees as many tokens in the packed row as in the document
    by itself, in a row with a document that exceeds the window.

    Runs in evaluation mode, without the module hooks of the user, and with small numbers in trainable parameters that
    are all zero; these, modes, random states, buffers and every ``.grad`` are as before afterwards.

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        implementation: as in `packed_attention`; ``off`` checks transformers' attention.
        lengths: tokens per document of the probe, at least two documents; None: `default_lengths`, and for windows that
            these do not exceed a second row with a document that does (up to `LARGEST_WINDOW`).
        attention: the handle from `packed_attention`, if the model is already inside that context.
        seed: of the probe's tokens.

    Raises:
        ValueError: fewer than two documents, or an implementation that is wrong for the model.
        NonFiniteError: the model's own results are NaN or infinite; a ValueError that names the parameter.
    """
    if lengths is not None and len(lengths) < 2:
        raise ValueError(f"lengths={tuple(lengths)} has {len(lengths)} document: pass at least two, e.g. (9, 1, 14, 6)")
    with contextlib.ExitStack() as stack:
        if attention is None:
            attention = stack.enter_context(packed_attention(model, implementation, vision_tower=False))
        stack.enter_context(isolated_run(model, training=False))
        stack.enter_context(zeros_perturbed(model))
        proof = _examine(Probe(model, attention, lengths or probe.default_lengths(model), seed), seed + 1)
        sizes = attention.features.windows
        # In fp16 the softmax rounds weights to zero of keys that are seen, but hardly.
        exact = attention.path != PADDED_DOCUMENTS and _compute_dtype(model) != torch.float16
        past = (tuple(lengths or ()) or probe.lengths_past(model, sizes)) if sizes and exact else ()
        try:
            windows = Probe(model, attention, past, seed).wrong_windows() if past else ()
        except torch.OutOfMemoryError:
            past = windows = ()
    # The last token of a document predicts nothing.
    skipped = tuple(f"window {size}" for size in sorted(sizes) if max(past, default=0) <= size + 1)
    return replace(proof, not_exercised=skipped, windows=windows)


def verify_shared(model: nn.Module, attention: PackedAttention) -> PackingProof:
    """Check as `verify_packing` that documents of `model` can share a prefix in a row, inside of `attention`.

    The gradient of the segment that each one continues must not be zero.
    """
    with isolated_run(model, training=False), zeros_perturbed(model):
        return _examine(Probe(model, attention, probe.SHARED_LENGTHS, 0, probe.SHARED_PARENTS))


def leak_of_stock(model: nn.Module, stock: PackedAttention) -> str:
    """Return how packed documents see each other under transformers' attention; empty if they do not."""
    with isolated_run(model, training=False), zeros_perturbed(model):
        proof = _examine(Probe(model, stock, probe.default_lengths(model), 0), compares=False)
    return str(proof) if proof.leaks else ""


def _examine(row: Probe, seed: int = 1, *, compares: bool = True) -> PackingProof:
    """Examine the dependences of segments on others, and the difference of documents; windows are not exercised."""
    embeddings, hidden = row.packed()
    directions = torch.Generator().manual_seed(seed)
    leaks: list[tuple[int, int, float]] = []
    unseen: list[tuple[int, int]] = []
    tokens = torch.arange(len(hidden)).split(row.lengths)
    for target, segment in enumerate(hidden.split(row.lengths)):
        direction = torch.randn(segment.shape, generator=directions).to(segment)
        (gradient,) = torch.autograd.grad((segment * direction).sum(), embeddings, retain_graph=True)
        sizes = [float(part.abs().max()) for part in row.of_tokens(gradient).cpu().split(row.lengths)]
        before, parent = set(row.paths[target].tolist()), row.parents[target]
        for source, size in enumerate(sizes):
            if size != 0.0 and not before.issuperset(tokens[source].tolist()):  # a NaN is a leak too
                leaks.append((source, target, size))
        # Of a parent the last tokens may be all that a window leaves.
        if parent >= 0 and sizes[parent] == 0.0:
            unseen.append((parent, target))
    hidden = hidden.detach().cpu()
    del embeddings, segment, gradient  # and the activations
    differences = [0.0]
    for segment_index, path in enumerate(row.paths if compares else ()):
        alone = row.separate(segment_index).cpu().double()
        if not torch.isfinite(alone).all():
            _name_non_finite(row.model)
        differences.append(float((hidden[path].double() - alone).norm() / alone.norm()))
    # No comparison with NaN holds: it must not hide behind `max`.
    difference = max(differences) if all(map(math.isfinite, differences)) else math.inf
    path = row.attention.path if row.attention.path != "off" else "stock"
    return PackingProof(path, row.lengths, tuple(leaks), difference, _budget(row.model), unseen=tuple(unseen))


def _budget(model: nn.Module) -> float | None:
    """Return the largest allowed difference of hidden states, or None. fp32 on CUDA may be TF32: 10 mantissa bits."""
    on_cuda = next(iter(model.parameters())).device.type == "cuda"
    exact = not on_cuda or torch.backends.cuda.matmul.fp32_precision != "tf32"
    return BUDGET if exact and torch.finfo(_compute_dtype(model)).eps <= torch.finfo(torch.float32).eps else None


def _name_non_finite(model: nn.Module) -> None:
    """Raise `NonFiniteError` with the first parameter or buffer that has values which are not finite."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            bad = int((~torch.isfinite(tensor.detach().float())).sum()) if tensor.is_floating_point() else 0
            if bad:
                raise NonFiniteError(f"{kind} {name} has non-finite values: {bad:,} of {tensor.numel():,}")
    raise NonFiniteError("hidden states of separate documents under TRL are not finite, although every parameter is")


def _compute_dtype(model: nn.Module) -> torch.dtype:
    device = next(iter(model.parameters())).device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtypes = [p.dtype for p in parameters_of(model) if p.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
