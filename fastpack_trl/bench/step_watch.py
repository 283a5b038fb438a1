"""Watches one optimizer step of a trainer's own loop: its phases, batches and losses."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.measure.timing import Clock, CudaClock
from fastpack_trl.measure.tokens import TokenCounter, TokenSums
from fastpack_trl.model.patches import attribute_set
from fastpack_trl.packing.packed_batch import PackedBatch

PHASES = ("data", "forward", "backward", "captured", "optimizer", "other")
"""``data``: from asking for batches until they are there. ``forward``: with loss and metrics. ``captured``: forward and
backward of micro-batches that are one CUDA graph, which has no mark between them. ``optimizer``: clipping,
the optimizer, the schedule, the gradients set to None. ``other``: the rest of the loop: NaN filter, counters, logging,
callbacks."""

LABEL = "step: "
"""Prefix of the phases in a profile."""


@dataclass(slots=True)
class RawStep:
    """One step as it was seen; marks are in the clock's unit, tensors stay where they are."""

    start: Any = None
    end: Any = None
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: {name: [] for name in PHASES[:-1]})
    losses: list[Tensor] = field(default_factory=list)
    batches: list[Mapping[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """The keywords of each call of the model."""
    gradient_norm: Any = None
    memory: list[tuple[Any, int]] = field(default_factory=list)
    """Marks with the bytes allocated on the device then; empty on the CPU."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step as plain figures; times in seconds.

    Attributes:
        seconds: of the whole step, waiting for the device at both ends.
        phases: seconds of each of `PHASES`; their sum is `seconds`.
        loss: mean per token that the loss counts, over the step's micro-batches.
        gradient_norm: before clipping; None where the run does not clip.
        micro_batches: that the step was made of.
        batch_tokens: positions of each of them, padding included.
        documents: tokens of each document.
        digest: of the tokens of all micro-batches, in order, without padding.
        tokens: as `TokenSums`.
        memory: (milliseconds since the start, bytes allocated on the device) at the ends of phases; empty on the CPU.
    """

    seconds: float
    phases: dict[str, float]
    loss: float
    gradient_norm: float | None
    micro_batches: int
    batch_tokens: list[int]
    documents: list[int]
    digest: str
    tokens: dict[str, Any]
    memory: list[tuple[float, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


class StepWatch(TrainerCallback):
    """Fills a `RawStep` while a trainer trains. It asks the device nothing; `settle` does, between two steps.

    Args:
        clock: of the marks.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.step = RawStep()
        self.labelled = False
        """True while a profile runs that names the phases."""
        self._forward_end: Any = None
        self._clipping: Any = None

    def _end(self) -> Any:
        """Mark the end of a phase."""
        now = self.clock.mark()
        if isinstance(self.clock, CudaClock):
            self.step.memory.append((now, torch.cuda.memory_allocated()))  # the allocator's own count: no sync
        return now

    @contextlib.contextmanager
    def around_step(self) -> Iterator[None]:
        """Watch one step; give it to `Training.advance`."""
        self.step = RawStep()
        self.clock.synchronise()
        self.step.start = self.clock.mark()
        yield
        self.step.end = self.clock.mark()
        self.clock.synchronise()

    @contextlib.contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Watch the calls of the loop, on this trainer only; all is restored on exit."""
        accelerator = trainer.accelerator
        batches, training_step, compute_loss = trainer.get_batch_samples, trainer.training_step, trainer.compute_loss
        clip, mark = accelerator.clip_grad_norm_, self.clock.mark

        def watched_batches(*args: Any, **kwargs: Any) -> Any:
            start = mark()
            with self._label("data"):
                found, items = batches(*args, **kwargs)
            self.step.spans["data"].append((start, self._end()))
            self.step.batches = list(found)
            return found, items

        def watched_step(*args: Any, **kwargs: Any) -> Tensor:
            start, self._forward_end, calls = mark(), None, len(self.step.calls)
            with self._label("forward and backward"):
                loss: Tensor = training_step(*args, **kwargs)
            if self._forward_end is not None:  # not where the micro-batch runs later, merged with others
                self.step.spans["forward"].append((start, self._forward_end))
                self.step.spans["backward"].append((self._forward_end, self._end()))
            elif len(self.step.calls) > calls:
                self.step.spans["captured"].append((start, self._end()))
            self.step.losses.append(loss.detach())
            return loss

        def watched_loss(*args: Any, **kwargs: Any) -> Any:
            with self._label("forward"):
                loss = compute_loss(*args, **kwargs)
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):  # a mark would be recorded
                self._forward_end = self._end()
            return loss

        def watched_clip(*args: Any, **kwargs: Any) -> Any:
            self._clipping = mark()
            self.step.gradient_norm = clip(*args, **kwargs)
            return self.step.gradient_norm

        def before_model(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if getattr(kwargs.get("packed_batch"), "is_static", False):
                return  # the row that was copied into it is shown next (`capture.graphs`)
            self.step.calls.append({**kwargs, "input_ids": args[0]} if args else dict(kwargs))

        before_model.sees_plain_rows = True  # type: ignore[attr-defined]  # called for each row of a captured step
        with contextlib.ExitStack() as stack:
            if not trainer.args.torch_compile:  # the compiled graph of a whole model would have the hook baked in
                stack.callback(trainer.model.register_forward_pre_hook(before_model, with_kwargs=True).remove)
            stack.enter_context(attribute_set(trainer, "get_batch_samples", watched_batches))
            stack.enter_context(attribute_set(trainer, "training_step", watched_step))
            stack.enter_context(attribute_set(trainer, "compute_loss", watched_loss))
            stack.enter_context(attribute_set(accelerator, "clip_grad_norm_", watched_clip))
            # First: the optimizer's end is before the callbacks of the user.
            trainer.callback_handler.callbacks.insert(0, self)
            stack.callback(trainer.remove_callback, self)
            yield

    def _label(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if not self.labelled:
            return contextlib.nullcontext()
        label: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(LABEL + name)
        return label

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the start of the optimizer, if no clipping came before."""
        if self._clipping is None:
            self._clipping = self.clock.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the optimizer: the gradients are gone."""
        self.step.spans["optimizer"].append((self._clipping, self._end()))
        self._clipping = None

    def settle(self, counter: TokenCounter, pad_token_id: int | None = None) -> StepFigures:
        """Return the figures of the step that has ended; let go of its tensors.

        Args:
            counter: counts the tokens of the model's calls.
            pad_token_id: what stands at the end of rows that are padded to a multiple; None where none are.
        """
        step, self.step = self.step, RawStep()
        seconds = self.clock.seconds(step.start, step.end)
        phases = {
            name: sum(self.clock.seconds(start, end) for start, end in spans) for name, spans in step.spans.items()
        }
        phases["other"] = max(0.0, seconds - sum(phases.values()))
        for inputs in step.calls or step.batches:
            counter.count(inputs)
        norm = step.gradient_norm
        return StepFigures(
            seconds=seconds,
            phases=phases,
            loss=float(sum(float(loss) for loss in step.losses)),
            gradient_norm=None if norm is None else float(norm),
            micro_batches=len(step.batches),
            batch_tokens=[int(inputs["input_ids"].numel()) for inputs in step.batches],
            documents=[length for inputs in step.batches for length in document_lengths(inputs)],
            digest=digest_of([document_tokens(inputs, pad_token_id) for inputs in step.batches]),
            tokens=_plain(counter.take()),
            memory=[(self.clock.seconds(step.start, mark) * 1000, used) for mark, used in step.memory],
        )


def _plain(sums: TokenSums) -> dict[str, Any]:
    out = asdict(sums)
    # JSON has text for keys: full attention is the window "none".
    out["pairs"] = {"none" if window is None else str(window): pairs for window, pairs in sums.pairs.items()}
    return out


def pairs_of(tokens: Mapping[str, Any]) -> dict[int | None, float]:
    """Return the inverse for `ModelFlops.count`: ``{"none": 6.0, "4": 5.0}`` -> ``{None: 6.0, 4: 5.0}``."""
    return {None if name == "none" else int(name): pairs for name, pairs in tokens["pairs"].items()}


def document_tokens(inputs: Mapping[str, Any], pad_token_id: int | None = None) -> Tensor:
    """Return (n,) int64 on the CPU: the tokens of a batch in order, whatever the collator put around them.

    Args:
        inputs: with a `PackedBatch`, an ``attention_mask`` of shape (rows, tokens), or rows without padding.
        pad_token_id: dropped from the end of rows whose batch does not say what is padding.
    """
    ids: Tensor = inputs["input_ids"]
    batch, mask = inputs.get("packed_batch"), inputs.get("attention_mask")
    if isinstance(batch, PackedBatch):
        return ids.flatten()[: batch.total_tokens - batch.num_padding].cpu()
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return ids[mask.bool()].cpu()
    flat = ids.flatten().cpu()
    if pad_token_id is None:
        return flat
    real = int((flat != pad_token_id).nonzero().max()) + 1 if bool((flat != pad_token_id).any()) else 0
    return flat[:real]


def document_lengths(inputs: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each document of a batch: of its `PackedBatch`, its positions, its mask, or its rows."""
    batch, mask, positions = inputs.get("packed_batch"), inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(batch, PackedBatch):
        return list(batch.seq_lengths)
    ids: Tensor = inputs["input_ids"]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return [int(length) for length in mask.sum(-1).tolist()]
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()
        return [end - start for start, end in zip(starts, [*starts[1:], positions.numel()], strict=True)]
    return [ids.shape[1]] * ids.shape[0]


def digest_of(batches: list[Tensor]) -> str:
    """Return a short hash of token ids; ``[[1, 2], [3]]`` and ``[[1], [2, 3]]`` differ."""
    found = hashlib.blake2b(digest_size=8)
    for tokens in batches:
        found.update(tokens.numel().to_bytes(8, "little"))
        found.update(tokens.to(torch.int64).contiguous().numpy().tobytes())
    return found.hexdigest()
