"""One training step of a model's decoder under each way to keep layer inputs, all around the same parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from benchmarks.lora_models import shared_copy
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.checkpointing.levels import layer_functions
from fastpack_trl.checkpointing.memory import checkpointable_layers
from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.checkpointing.streams import CudaStreams, HostStreams, Streams, TimedCudaStreams
from fastpack_trl.measure.device_memory import PeakMemory
from fastpack_trl.model.facts import backbones, text_model
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

CHECKPOINT, TRANSFORMERS, SINGLE, TRL, OURS = (
    "checkpoint", "transformers_offload", "single_buffer", "trl_offload", "double_buffer",
)  # fmt: skip
SIDES = (CHECKPOINT, TRANSFORMERS, SINGLE, TRL, OURS)


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row on the device: token ids ``(1, tokens)`` and its documents."""

    ids: Tensor
    packed: PackedBatch

    @classmethod
    def of(cls, tokens: int, document: int, vocabulary: int, device: str, seed: int) -> Batch:
        """Return `tokens` random tokens in documents of `document` tokens, the last one shorter."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, tokens), generator=generator)
        lengths = [document] * (tokens // document) + ([tokens % document] if tokens % document else [])
        return cls(ids.to(device), PackedBatch.from_lengths(lengths).to(torch.device(device)))


@dataclass
class DecoderSide:
    """A copy of the model's modules around the shared parameters, with one way to keep layer inputs installed.

    The head is left out: with fewer layers than the public model it would weigh more than it does there. The loss is
    the mean square of the last hidden states.
    """

    name: str
    model: Any
    device: str
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    offload: Offload | None = None
    timed: list[TimedCudaStreams] = field(default_factory=list)

    def step(
        self, batch: Batch, between: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, dict[str, int] | None]:  # fmt: skip
        """Run forward, call `between`, run backward; return the loss and the memory of the step."""
        memory = PeakMemory(self.device)
        self.model.zero_grad()
        decoder = backbones(self.model)[0]
        kwargs = to_transformers_kwargs(batch.packed) | {"packed_batch": batch.packed}
        with self.around():
            with torch.autocast(self.device, dtype=torch.bfloat16):
                hidden = decoder(batch.ids, use_cache=False, **kwargs)[0]
            loss = hidden.float().square().mean()
            between()
            loss.backward()
        batch.packed.clear_derived()
        return loss.detach(), memory.read()

    def gradient_norm(self) -> float:
        """Return the norm of all gradients, after a step."""
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())


@contextlib.contextmanager
def side(name: str, weights: Any, device: str, *, timed: bool = False) -> Iterator[DecoderSide]:
    """Make and install a side.

    Args:
        name: one of `SIDES`.
        weights: the model whose parameters all sides share.
        device: ``cpu`` or ``cuda``.
        timed: read copy times and stalls from events (`TimedCudaStreams`); CUDA, our sides.
    """
    model = shared_copy(weights).train()
    model.enable_input_require_grads()
    made = DecoderSide(name, model, device)
    layers = checkpointable_layers(model)

    def streams(of: torch.device) -> Streams:
        if of.type != "cuda":
            return HostStreams(of)
        if not timed:
            return CudaStreams(of)
        made.timed.append(TimedCudaStreams(of))
        return made.timed[-1]

    plain = functools.partial(checkpoint, use_reentrant=False)
    function = plain if name != TRANSFORMERS else _transformers_function(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
        stack.enter_context(layer_functions(layers, [(function, True)] * len(layers)))
        if name in (SINGLE, OURS):
            mode: Any = name
            least = 2**20 if device == "cuda" else 1
            made.offload = stack.enter_context(offload_checkpoints(layers, mode, min_bytes=least, streams=streams))
        if name == TRL:
            PartialState()  # TRL logs through accelerate, which wants its state first; a trainer has made it
            offloading = get_act_offloading_ctx_manager(model=text_model(model))
            made.around = lambda: offloading
        yield made


def _transformers_function(model: Any) -> Callable[..., Any]:
    """Return transformers' own offloading checkpoint, by its public switch.

    Raises:
        TypeError: a version without it.
    """
    base = text_model(model)
    new = hasattr(base, "activation_checkpointing_enable")
    enable = base.activation_checkpointing_enable if new else base.gradient_checkpointing_enable
    enable(**{f"{'activation' if new else 'gradient'}_checkpointing_kwargs": {"use_reentrant": False}, "offload": True})
    function: Callable[..., Any] = checkpointable_layers(model)[0]._gradient_checkpointing_func
    return function
