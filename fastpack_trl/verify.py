"""Run-time proof that packed documents do not see each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.attention.model_features import text_model
from fastpack_trl.attention.seam import PackedAttention, packed_attention
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

DEFAULT_LENGTHS = (9, 1, 14, 6)
"""Tokens per document: unequal, one of a single token, one longer than both of its neighbours."""

# Rounding of a mean loss may differ by a few units in the last place of the dtype that computed it.
_ULPS = 4


@dataclass(frozen=True, slots=True)
class PackingProof:
    """What was shown.

    Attributes:
        path: how documents were kept apart, e.g. ``per_document``; ``stock`` where nothing of ours ran.
        lengths: tokens of each document of the probe.
        leaks: ``(i, j, gradient)`` for every pair in which document j's logits depend on document i's embeddings, with
            the largest absolute gradient. Empty is the proof.
        packed_loss, separate_loss: mean loss per token, packed and document by document under stock attention.
        budget: how far the two may be apart; None where the difference is reported only (experts below fp32, whose
            routing may flip on rounding).
        not_exercised: windows and chunks longer than the probe's longest document.
    """

    path: str
    lengths: tuple[int, ...]
    leaks: tuple[tuple[int, int, float], ...]
    packed_loss: float
    separate_loss: float
    budget: float | None
    not_exercised: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        return abs(self.packed_loss - self.separate_loss)

    @property
    def proven(self) -> bool:
        return not self.leaks and (self.budget is None or self.difference <= self.budget)

    def __str__(self) -> str:
        if self.leaks:
            source, target, size = max(self.leaks, key=lambda leak: leak[2])
            pairs = len(self.lengths) * (len(self.lengths) - 1)
            return (
                f"LEAK: {len(self.leaks)} of {pairs} pairs; document {target} depends on document {source} ({size:.2g})"
            )
        loss = f"loss differs by {self.difference:.1e} from separate documents"
        bound = "reported only" if self.budget is None else f"budget {self.budget:.1e}"
        skipped = f"; not exercised: {', '.join(self.not_exercised)}" if self.not_exercised else ""
        verdict = "proven: no document sees another" if self.proven else "FAILED: packed is not what it must be"
        return f"{verdict}; {loss} ({bound}){skipped}"

    def raise_if_failed(self) -> PackingProof:
        """Return self, or raise.

        Raises:
            PackingError: a leak or a loss over the budget; names the remedy.
        """
        if self.proven:
            return self
        remedy = {"stock": "packed_attention='auto'", "padded_rows": "packing=False"}.get(
            self.path, "packed_attention='padded_rows'"
        )
        raise PackingError(f"packing proof with {self.path}: {self}; set {remedy}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "difference": self.difference, "proven": self.proven}


def verify_packing(
    model: nn.Module,
    *,
    implementation: str = "auto",
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    attention: PackedAttention | None = None,
    padded_rows_limit: float = float("inf"),
    seed: int = 0,
) -> PackingProof:
    """Prove on a few tokens that no packed document of `model` depends on another.

    (1) For every pair i != j the gradient of document j's logits with respect to document i's input embeddings is
    exactly zero. (2) The packed loss is that of the documents run one by one under the model's stock attention.

    Runs in evaluation mode; modes, random states and every ``.grad`` are as before afterwards.

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        implementation: as in `packed_attention`; ``off`` examines stock.
        lengths: tokens per document of the probe; at least two documents.
        attention: what `packed_attention` yielded, when the model is already inside of it.
        padded_rows_limit: as in `packed_attention`; the probe's own padding says nothing about the data.
        seed: of the probe's tokens.

    Raises:
        ValueError: fewer than two documents, or an implementation that is wrong for the model.
    """
    if len(lengths) < 2:
        raise ValueError(f"lengths={tuple(lengths)} has {len(lengths)} document: give at least two, e.g. 9 1 14 6")
    with contextlib.ExitStack() as stack:
        if attention is None:
            attention = stack.enter_context(
                packed_attention(model, implementation, padded_rows_limit=padded_rows_limit)
            )
        stack.enter_context(_undisturbed(model))
        return _Probe(model, attention, tuple(lengths), seed).run()


class _Probe:
    """One probe batch and the two comparisons on it."""

    def __init__(self, model: nn.Module, attention: PackedAttention, lengths: tuple[int, ...], seed: int) -> None:
        self.model = model
        self.attention = attention
        self.config: Any = text_model(model).config.get_text_config()
        device = next(iter(model.parameters())).device
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(int(self.config.vocab_size), (1, sum(lengths)), generator=generator).to(device)
        self.batch = PackedBatch.from_lengths(lengths).to(device)
        self.directions = torch.Generator().manual_seed(seed + 1)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.batch.seq_lengths

    def run(self) -> PackingProof:
        try:
            leaks, packed = self.leaks_and_loss()
        finally:
            self.batch.clear_derived()
        separate = self.separate_loss()
        return PackingProof(
            path=self.attention.path if self.attention.path != "off" else "stock",
            lengths=self.lengths,
            leaks=tuple(leaks),
            packed_loss=packed,
            separate_loss=separate,
            budget=self.budget(separate),
            not_exercised=tuple(self.not_exercised()),
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings as a leaf that takes a gradient, for both comparisons.

        On the CPU bitsandbytes re-packs 4-bit weights for good in an evaluation forward whose input takes none, and
        training then runs a kernel without a backward (bitsandbytes 0.50, `Linear4bit.forward`).
        """
        embedding: Any = text_model(self.model).get_input_embeddings()
        embeddings: Tensor = embedding(ids).detach().requires_grad_()
        return embeddings

    def leaks_and_loss(self) -> tuple[list[tuple[int, int, float]], float]:
        leaf = self.embed(self.ids)
        kwargs = to_transformers_kwargs(self.batch)
        if self.attention.path != "off":
            kwargs["packed_batch"] = self.batch
        with torch.enable_grad():
            # A copy: some families scale their embeddings in place.
            logits = self.model(inputs_embeds=leaf.clone(), use_cache=False, **kwargs).logits
        documents = self.documents(logits)
        leaks = []
        for target, document in enumerate(documents):
            direction = torch.randn(document.shape, generator=self.directions).to(document)
            (gradient,) = torch.autograd.grad((document * direction).sum(), leaf, retain_graph=True)
            for source, part in enumerate(gradient[0].split(self.lengths)):
                largest = float(part.abs().max())
                if source != target and largest != 0.0:  # exactly zero; a NaN is a leak too
                    leaks.append((source, target, largest))
        return leaks, self.mean_loss([document.detach() for document in documents])

    def separate_loss(self) -> float:
        """The documents one by one: without `packed_batch` the model runs stock's own attention."""
        return self.mean_loss([self.stock_logits(ids) for ids in self.ids[0].split(self.lengths)])

    def stock_logits(self, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            logits: Tensor = self.model(inputs_embeds=self.embed(ids[None]).clone(), use_cache=False).logits[0]
        return logits.detach()[-len(ids) :]  # prompt learning puts its virtual tokens before

    def documents(self, logits: Tensor) -> list[Tensor]:
        """Logits of each document, (length, vocabulary); prompt learning puts its virtual tokens before the row."""
        return list(logits[0, -sum(self.lengths) :].split(self.lengths))

    def mean_loss(self, documents: list[Tensor]) -> float:
        ids = self.ids[0].split(self.lengths)
        losses = [
            nn.functional.cross_entropy(logits[:-1].double(), tokens[1:].to(logits.device), reduction="sum")
            for logits, tokens in zip(documents, ids, strict=True)
            if len(tokens) > 1
        ]
        return float(sum(losses)) / max(1, sum(length - 1 for length in self.lengths))

    def budget(self, loss: float) -> float | None:
        dtype = _compute_dtype(self.model)
        if _has_experts(self.config) and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
            return None
        return _ULPS * _epsilon(dtype, next(iter(self.model.parameters())).device) * max(1.0, abs(loss))

    def not_exercised(self) -> Iterator[str]:
        longest = max(self.lengths)
        for window in sorted(self.attention.features.windows):
            if window >= longest:
                yield f"window {window}"
        chunk = getattr(self.config, "attention_chunk_size", None)
        if chunk is not None and chunk >= longest:
            yield f"chunk {chunk}"


def _compute_dtype(model: nn.Module) -> torch.dtype:
    device = next(iter(model.parameters())).device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Relative rounding of a matrix product: fp32 products on CUDA may run in TF32, which has 10 bits."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return max(torch.finfo(dtype).eps, 2.0**-10 if tf32 and dtype == torch.float32 else 0.0)


def _has_experts(config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module's mode and every random state is as before."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
