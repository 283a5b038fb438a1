"""Watches one optimizer step of a trainer's own loop: its phases, batches and losses."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.bench.profiles import LABEL
from fastpack_trl.measure.timing import Clock
from fastpack_trl.measure.tokens import TokenCounter
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.packed_batch import PackedBatch

PHASES = ("data", "forward", "backward", "captured", "optimizer", "other")
"""``data``: from asking for batches until they are there. ``forward``: with loss and metrics. ``captured``: forward and
backward of micro-batches that are one CUDA graph, which has no mark between them. ``optimizer``: clipping,
the optimizer, the schedule, the gradients set to None. ``other``: the rest of the loop: NaN filter, counters, logging,
callbacks."""


@dataclass(slots=True)
class RawStep:
    """One step as it was seen; marks are in the clock's unit, tensors stay where they are.

    `calls` has the keywords of each call of the model.
    """

    start: Any
    end: Any = None
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: {name: [] for name in PHASES[:-1]})
    losses: list[Tensor] = field(default_factory=list)
    batches: list[Mapping[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    gradient_norm: Any = None


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
        tokens: `TokenSums` as plain data.
        memory: bytes of device memory; None on the CPU.
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
    memory: dict[str, int] | None


class StepWatch(TrainerCallback):
    """Fills a `RawStep` while a trainer trains. It does not synchronise; `settle` does, between two steps.

    Args:
        pad_token_id: what stands at the end of rows that are padded to a multiple; None where none are.
    """

    def __init__(self, clock: Clock, pad_token_id: int | None = None) -> None:
        self.clock, self.pad_token_id = clock, pad_token_id
        self.counter = TokenCounter(())
        self.step = RawStep(None)
        self._forward_end: Any = None
        self._clipping: Any = None

    @contextlib.contextmanager
    def around_step(self, *inside: AbstractContextManager[Any]) -> Iterator[None]:
        """Watch one step, inside of other contexts (a profiler); give it to `Training.advance`."""
        with contextlib.ExitStack() as stack:
            for context in inside:
                stack.enter_context(context)
            self.clock.synchronise()
            self.step = RawStep(self.clock.mark())
            yield
            self.step.end = self.clock.mark()
            self.clock.synchronise()

    @contextlib.contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Watch the calls of the loop, on this trainer only; all is restored on exit."""
        accelerator = trainer.accelerator
        batches, training_step, compute_loss = trainer.get_batch_samples, trainer.training_step, trainer.compute_loss
        clip, mark, named = accelerator.clip_grad_norm_, self.clock.mark, torch.profiler.record_function

        def watched_batches(*args: Any, **kwargs: Any) -> Any:
            start = mark()
            with named(LABEL + "data"):
                found, items = batches(*args, **kwargs)
            self.step.spans["data"].append((start, mark()))
            # Prompts alone, of trainers that generate, are not what the model is given: that is kept at its loss.
            self.step.batches = [batch for batch in found if isinstance(batch, Mapping) and "input_ids" in batch]
            return found, items

        def watched_step(*args: Any, **kwargs: Any) -> Tensor:
            start, self._forward_end, calls = mark(), None, len(self.step.calls)
            with named(LABEL + "forward and backward"):
                loss: Tensor = training_step(*args, **kwargs)
            if self._forward_end is not None:  # not where the micro-batch runs later, merged with others
                self.step.spans["forward"].append((start, self._forward_end))
                self.step.spans["backward"].append((self._forward_end, mark()))
            elif len(self.step.calls) > calls:
                self.step.spans["captured"].append((start, mark()))
            self.step.losses.append(loss.detach())
            return loss

        def watched_loss(*args: Any, **kwargs: Any) -> Any:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            if "completion_ids" in inputs and "prompt_ids" in inputs:
                self.step.batches.append(joined(inputs))
            with named(LABEL + "forward"):
                loss = compute_loss(*args, **kwargs)
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):  # a mark would be recorded
                self._forward_end = mark()
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
            for owner, name, watched in (
                (trainer, "get_batch_samples", watched_batches),
                (trainer, "training_step", watched_step),
                (trainer, "compute_loss", watched_loss),
                (accelerator, "clip_grad_norm_", watched_clip),
            ):
                stack.enter_context(patch_attribute(owner, name, watched))
            # First: the optimizer's end is before the callbacks of the user.
            trainer.callback_handler.callbacks.insert(0, self)
            stack.callback(trainer.remove_callback, self)
            yield

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the start of the optimizer, if no clipping came before."""
        if self._clipping is None:
            self._clipping = self.clock.mark()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the end of the optimizer: the gradients are gone."""
        self.step.spans["optimizer"].append((self._clipping, self.clock.mark()))
        self._clipping = None

    def settle(self, memory: dict[str, int] | None = None) -> StepFigures:
        """Return the figures of the step that has ended; let go of its tensors."""
        step, self.step = self.step, RawStep(None)
        seconds = self.clock.seconds(step.start, step.end)
        phases = {
            name: sum(self.clock.seconds(start, end) for start, end in spans) for name, spans in step.spans.items()
        }
        for inputs in step.calls or step.batches:
            self.counter.count(inputs)
        norm = step.gradient_norm
        documents = [documents_of(inputs, self.pad_token_id) for inputs in step.batches]
        return StepFigures(
            seconds=seconds,
            phases={**phases, "other": max(0.0, seconds - sum(phases.values()))},
            loss=float(sum(float(loss) for loss in step.losses)),
            gradient_norm=None if norm is None else float(norm),
            micro_batches=len(step.losses),
            batch_tokens=[int(inputs["input_ids"].numel()) for inputs in step.batches],
            documents=[length for _, lengths in documents for length in lengths],
            digest=digest_of([tokens for tokens, _ in documents]),
            tokens=asdict(self.counter.take()),
            memory=memory,
        )


def joined(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return prompts and completions of a micro-batch that was generated as the batch that the model is given."""
    parts = {"input_ids": "ids", "attention_mask": "mask"}
    return {
        name: torch.cat([inputs[f"{kind}_{part}"] for kind in ("prompt", "completion")], 1)
        for name, part in parts.items()
    }


def documents_of(inputs: Mapping[str, Any], pad_token_id: int | None = None) -> tuple[Tensor, list[int]]:
    """Return the tokens of a batch in order, (n,) int64 on the CPU, and how many each document has.

    Whatever the collator put around them is left out, and what lies in a row once is there for each document: by the
    `PackedBatch`, by an ``attention_mask`` of shape (rows, tokens), or, where neither says what is padding, by
    `pad_token_id` at the end.
    """
    inputs = unshared(inputs)
    ids: Tensor = inputs["input_ids"]
    batch, mask, positions = inputs.get("packed_batch"), inputs.get("attention_mask"), inputs.get("position_ids")
    if isinstance(batch, PackedBatch):
        return ids.flatten()[: batch.total_tokens - batch.num_padding].cpu(), list(batch.seq_lengths)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return ids[mask.bool()].cpu(), [int(length) for length in mask.sum(-1).tolist()]
    lengths = [ids.shape[1]] * ids.shape[0]
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        starts = (positions.flatten() == 0).nonzero().flatten().tolist()
        lengths = [end - start for start, end in itertools.pairwise([*starts, positions.numel()])]
    flat = ids.flatten().cpu()
    if pad_token_id is None:
        return flat, lengths
    real = (flat != pad_token_id).nonzero().flatten()
    return flat[: int(real[-1]) + 1 if len(real) else 0], lengths


def digest_of(batches: list[Tensor]) -> str:
    """Return a short hash of token ids; ``[[1, 2], [3]]`` and ``[[1], [2, 3]]`` differ."""
    found = hashlib.blake2b(digest_size=8)
    for tokens in batches:
        found.update(tokens.numel().to_bytes(8, "little"))
        found.update(tokens.to(torch.int64).contiguous().numpy().tobytes())
    return found.hexdigest()
