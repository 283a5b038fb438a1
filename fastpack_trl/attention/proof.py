"""Run-time proof that packed documents do not see each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.attention.install import PackedAttention, packed_attention
from fastpack_trl.attention.probe import Probe, default_lengths, exceeds, last_past, lengths_past, spans, text_config
from fastpack_trl.errors import NonFiniteError, PackingError, UnsteadyError
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.facts import UNREADABLE
from fastpack_trl.model.sharded import any_rank, fsdp_modules

# Rounding of a mean loss may differ by a few units in the last place of the dtype that computed it.
_ULPS = 4

Leaks = list[tuple[int, int, float]]


@dataclass(frozen=True, slots=True)
class PackingProof:
    """Result of a packing proof.

    Attributes:
        path: how documents were kept apart, e.g. ``per_document``; ``stock`` where nothing of ours ran.
        lengths: tokens of each document of the probe.
        leaks: ``(i, j, gradient)`` for every pair in which document j's logits depend on document i's embeddings, with
            the largest absolute gradient; or on its token ids alone, with the largest change. Empty is the proof.
        packed_loss, separate_loss: mean loss per token, packed and document by document under stock attention; by
            token ids where these differ more than by embeddings.
        budget: how far the two may be apart; None where the difference is reported only (experts below fp32, whose
            routing may flip on rounding).
        not_exercised: windows and chunks that no document of the probe exceeds.
        past_window: tokens of each document of a second row, with one that exceeds the model's windows; empty where
            none was needed or affordable.
        windows: ``(layer, packed, separate)`` for every attention layer whose last token of a document sees another
            number of tokens in the packed row than in the document by itself. Empty is right.
        unseen: ``(i, j)`` for every segment j of a row with shared prefixes that goes on from segment i and does not
            depend on it. Empty is right.
    """

    path: str
    lengths: tuple[int, ...]
    leaks: tuple[tuple[int, int, float], ...]
    packed_loss: float
    separate_loss: float
    budget: float | None
    not_exercised: tuple[str, ...] = ()
    past_window: tuple[int, ...] = ()
    windows: tuple[tuple[str, int, int], ...] = ()
    unseen: tuple[tuple[int, int], ...] = ()

    @property
    def difference(self) -> float:
        return abs(self.packed_loss - self.separate_loss)

    @property
    def proven(self) -> bool:
        return not (self.leaks or self.windows or self.unseen) and (
            self.budget is None or self.difference <= self.budget
        )

    def __str__(self) -> str:
        if self.leaks:
            source, target, size = max(self.leaks, key=lambda leak: leak[2])
            pairs = len(self.lengths) * (len(self.lengths) - 1)
            return (
                f"LEAK: {len(self.leaks)} of {pairs} pairs; document {target} depends on document {source} ({size:.2g})"
            )
        if self.windows:
            layer, packed, separate = self.windows[0]
            return (
                f"WINDOW: attention layers that see another number of tokens than in separate documents: "
                f"{len({name for name, *_ in self.windows})}; {layer} sees {packed}, not {separate}"
            )
        if self.unseen:
            return f"UNSEEN: segment {self.unseen[0][1]} does not depend on segment {self.unseen[0][0]} before it"
        loss = f"loss differs by {self.difference:.1e} from separate documents"
        bound = "reported only" if self.budget is None else f"budget {self.budget:.1e}"
        skipped = f"; not exercised: {', '.join(self.not_exercised)}" if self.not_exercised else ""
        verdict = "proven: no document sees another" if self.proven else "FAILED: packed is not what it must be"
        return f"{verdict}; {loss} ({bound}){skipped}"

    def raise_if_failed(self, remedy: str = "") -> PackingProof:
        """Return self, or raise.

        Args:
            remedy: what to do instead; default: the attention that would be right.

        Raises:
            PackingError: a leak, a wrong window or a loss over the budget; names the remedy.
        """
        if self.proven:
            return self
        settings = {"stock": "packed_attention='auto'", "padded_rows": "packing=False"}
        setting = settings.get(self.path, "packed_attention='padded_rows'")
        raise PackingError(f"packing proof with {self.path}: {self}; {remedy or f'set {setting}'}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "difference": self.difference, "proven": self.proven}


def verify_packing(
    model: nn.Module,
    *,
    implementation: str = "auto",
    lengths: Sequence[int] | None = None,
    attention: PackedAttention | None = None,
    padded_rows_limit: float = float("inf"),
    seed: int = 0,
) -> PackingProof:
    """Prove on a few tokens that no packed document of `model` depends on another.

    (1) For every pair i != j the gradient of document j's logits with respect to document i's input embeddings is
    exactly zero. (2) The packed loss is that of the documents run one by one under the model's stock attention.
    (3) In a model with windows each attention layer sees as many tokens in the packed row as in the document by
    itself, in a row with a document that exceeds the window. (4) Where token ids give other results than their
    embeddings, (2) holds for them too, and no document's logits change with the ids of another.

    Runs in evaluation mode, without the module hooks of the user; modes, random states, buffers and every ``.grad``
    are as before afterwards.

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        implementation: as in `packed_attention`; ``off`` examines stock.
        lengths: tokens per document of the probe, at least two documents; None: `default_lengths`, and for windows that
            these do not exceed a second row with a document that does (up to `LARGEST_WINDOW`).
        attention: what `packed_attention` yielded, when the model is already inside of it.
        padded_rows_limit: as in `packed_attention`; the probe's own padding says nothing about the data.
        seed: of the probe's tokens.

    Raises:
        ValueError: fewer than two documents, or an implementation that is wrong for the model.
        NonFiniteError: the model's own results are NaN or infinite; a ValueError that names the parameter.
        UnsteadyError: they differ from run to run, also document by document; a ValueError.
    """
    if lengths is not None and len(lengths) < 2:
        raise ValueError(f"lengths={tuple(lengths)} has {len(lengths)} document: give at least two, e.g. 9 1 14 6")
    with contextlib.ExitStack() as stack:
        if attention is None:
            attention = stack.enter_context(
                packed_attention(model, implementation, padded_rows_limit=padded_rows_limit)
            )
        stack.enter_context(isolated_run(model, training=False))
        probe = Probe(model, attention, tuple(lengths or default_lengths(model)), seed)
        leaks, packed, separate = _leaks_and_losses(probe, seed + 1)
        past, windows, losses = _past_windows(probe, seed, fixed=lengths is not None)
    # The losses of the second row count as those of the first.
    predictions = _predictions(probe)
    if losses:
        predictions += last_past(past) - 2
        packed, separate = packed + sum(one for one, _ in losses), separate + sum(other for _, other in losses)
    exercised = max(probe.lengths + past)
    return PackingProof(
        path=attention.path if attention.path != "off" else "stock",
        lengths=probe.lengths,
        leaks=tuple(leaks),
        packed_loss=packed / predictions,
        separate_loss=separate / predictions,
        budget=budget_of(model, separate / predictions),
        not_exercised=tuple(name for name, size in spans(attention, model).items() if not exceeds(exercised, size)),
        past_window=past,
        windows=windows,
    )


def _predictions(probe: Probe) -> int:
    return max(1, sum(length - 1 for length in probe.lengths))


def _leaks_and_losses(probe: Probe, seed: int) -> tuple[Leaks, float, float]:
    """Return the dependences of documents on others, and the sums of losses, packed and separate."""
    leaf = probe.embed(probe.ids)
    try:
        row = probe.packed(leaf, sum(probe.lengths))
    finally:
        probe.batch.clear_derived()
    leaks = _gradients(probe, row, leaf, seed)
    row = row.detach()
    packed = probe.packed_losses(row)
    finite = math.isfinite(packed) and all(math.isfinite(size) for *_, size in leaks)
    if not finite:
        _check_weights(probe.model)
    separate = probe.separate_losses()
    if not finite and not math.isfinite(separate):
        raise NonFiniteError("the loss of separate documents under stock is not finite, though every parameter is")
    if leaks or not finite:
        return leaks, packed, separate
    _check_steady(probe, packed, separate)
    leaks, by_ids = _leaks_by_ids(probe, row, seed + 1)
    if by_ids is not None and not abs(by_ids[0] - by_ids[1]) <= abs(packed - separate):
        packed, separate = by_ids
    return leaks, packed, separate


def _gradients(probe: Probe, row: Tensor, leaf: Tensor, seed: int) -> Leaks:
    """Return the gradients of documents' logits, of the packed row, that are not zero at other documents."""
    directions = torch.Generator().manual_seed(seed)
    leaks = []
    for target, document in enumerate(row.split(probe.lengths)):
        direction = torch.randn(document.shape, generator=directions).to(document)
        (gradient,) = torch.autograd.grad((document * direction).sum(), leaf, retain_graph=True)
        leaks += [(source, target, size) for source, size in _sizes(probe, gradient[0]) if source != target]
    return leaks


def _sizes(probe: Probe, values: Tensor) -> list[tuple[int, float]]:
    """Return the documents in which `values`, of the tokens of the row, are not exactly zero, and the largest there."""
    sizes = enumerate(float(part.abs().max()) for part in values.split(probe.lengths))
    return [(document, size) for document, size in sizes if size != 0.0]  # a NaN is a leak too


def _leaks_by_ids(probe: Probe, row: Tensor, seed: int) -> tuple[Leaks, tuple[float, float] | None]:
    """Return changes of documents' logits with the ids of others, and the sums of losses by ids, packed and separate.

    None of both where ids give `row`, the logits by their embeddings, or the model takes none: else ids say more, e.g.
    of n-grams.
    """
    model = probe.model
    try:
        packed = probe.by_ids(probe.ids, packed=True)
        if not any_rank(model, not torch.equal(packed, row)):  # the same operations on the same numbers
            return [], None
        # Experts round by what is beside a token, and a kernel that rounds otherwise in each run tells nothing exactly.
        exact = not _has_experts(model) and not any_rank(
            model, not torch.equal(probe.by_ids(probe.ids, packed=True), packed)
        )
        leaks = _changes(probe, packed, seed) if exact else []
        separate = probe.separate_losses(by_ids=True)
    except (PackingError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except UNREADABLE:  # the model takes no `input_ids`, or not those of a packed row
        if fsdp_modules(model):
            raise  # the other processes run on without this one
        return [], None
    finally:
        probe.batch.clear_derived()
    return leaks, (probe.packed_losses(packed), separate)


def _changes(probe: Probe, packed: Tensor, seed: int) -> Leaks:
    others = Probe(probe.model, probe.attention, probe.lengths, seed).ids
    leaks = []
    for source, (start, end) in enumerate(pairwise(probe.batch.cu_seqlens.tolist())):
        ids = probe.ids.clone()
        ids[:, start:end] = others[:, start:end]
        changes = _sizes(probe, probe.by_ids(ids, packed=True) - packed)
        leaks += [(source, target, size) for target, size in changes if target != source]
    return leaks


def _check_steady(probe: Probe, packed: float, separate: float) -> None:
    """Run separate documents again where the packed ones give another loss: a model may be random by itself."""
    predictions = _predictions(probe)
    budget = budget_of(probe.model, separate / predictions)
    if budget is None or not any_rank(probe.model, abs(packed - separate) > budget * predictions):
        return
    again = probe.separate_losses()
    if any_rank(probe.model, abs(again - separate) > budget * predictions):
        raise UnsteadyError(
            "its results differ from run to run in evaluation mode: the same documents have a loss of "
            f"{separate / predictions:.6g}, then of {again / predictions:.6g}"
        )


def _past_windows(
    probe: Probe, seed: int, *, fixed: bool
) -> tuple[tuple[int, ...], tuple[tuple[str, int, int], ...], list[tuple[float, float]]]:
    """Compare what layers see in a row that exceeds the model's windows: `probe`, or if not `fixed` a longer one.

    Returns:
        The documents of that row where it is another than `probe`, `PackingProof.windows`, and its losses.
    """
    model, attention = probe.model, probe.attention
    sizes = list(spans(attention, model).values())
    larger = [size for size in sizes if not exceeds(max(probe.lengths), size)]
    past = lengths_past(model, larger) if larger and not fixed else ()
    # In fp16 the softmax rounds weights to zero of keys that are seen, but hardly.
    if not sizes or (not past and _compute_dtype(model) == torch.float16):
        return (), (), []
    row = Probe(model, attention, past, seed) if past else probe
    try:
        packed, separate, losses = row.reach(last_past(past) if past else 1)
    except torch.OutOfMemoryError:
        if fsdp_modules(model):
            raise  # the other processes run the next document without this one
        return (), (), []
    finally:
        row.batch.clear_derived()
    wrong = tuple(
        (layer, seen, separate[layer, document])
        for (layer, document), seen in packed.items()
        if separate.get((layer, document), seen) != seen
    )
    return past, wrong if _compute_dtype(model) != torch.float16 else (), losses


def budget_of(model: nn.Module, loss: float) -> float | None:
    """Return how far two mean losses may be apart by rounding; None where that says nothing (`PackingProof.budget`)."""
    dtype, device = _compute_dtype(model), next(iter(model.parameters())).device
    if _has_experts(model) and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        return None
    # fp32 products on CUDA may run in TF32, which has 10 bits.
    tf32 = dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return _ULPS * (2.0**-10 if tf32 else torch.finfo(dtype).eps) * max(1.0, abs(loss))


def _check_weights(model: nn.Module) -> None:
    """Raise `NonFiniteError` for the first parameter or buffer with values that are not finite."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            bad = int((~torch.isfinite(tensor.detach().float())).sum()) if tensor.is_floating_point() else 0
            if bad:
                raise NonFiniteError(f"{kind} {name} has non-finite values: {bad:,} of {tensor.numel():,}")


def _compute_dtype(model: nn.Module) -> torch.dtype:
    device = next(iter(model.parameters())).device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _has_experts(model: nn.Module) -> bool:
    config, names = text_config(model), ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)
