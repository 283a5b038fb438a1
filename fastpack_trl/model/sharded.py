"""The processes of a run, and models that FSDP 2 shards over them: these must run as a whole, in all processes at once.

Their modules cannot be called one by one: the first FSDP module that runs becomes the root of those inside, and the
parameters of the others are missing. So a hook replaces the embeddings while the whole model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from fastpack_trl.errors import RankFailedError, describe
from fastpack_trl.model.facts import text_model

FAILURE_GRACE_SECONDS = 30.0
"""Seconds for which a process that failed in a collective waits for the others, which fail at once."""
_REASON_BYTES = 512


class Ranks:
    """Collectives for joint decisions. Every process must make the same calls in the same order.

    They use a process group of their own (gloo), made at the first call, past the device and the run's collectives. A
    single process makes none; `timeout` is that of a call that other processes do not join.
    """

    def __init__(self, count: int, timeout: timedelta | None = None) -> None:
        self.count = count if distributed.is_available() and distributed.is_initialized() else 1
        self._timeout, self._group = timeout, None

    def _reduce(self, values: torch.Tensor, timeout: float | None = None) -> torch.Tensor:
        """Take the maximum of each value over all processes, in place; raise `RankFailedError` if others do not."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self._timeout)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MAX
        if timeout is not None:
            # Set on the operation: one whose `wait` alone times out delays the exit by the group's timeout.
            options.timeout = timedelta(seconds=timeout)
        group: Any = self._group
        try:
            group.allreduce([values], options).wait()
        except RuntimeError as error:
            why = f"rank {distributed.get_rank()}: no joint decision: {describe(error)}"
            raise RankFailedError(f"{why}; see the logs of the other processes, or raise ddp_timeout") from error
        return values

    def all_max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all processes."""
        if self.count == 1:
            return list(values)
        maxima: list[float] = self._reduce(torch.tensor(values, dtype=torch.float64)).tolist()
        return maxima

    def all_min(self, values: Sequence[float]) -> list[float]:
        """Return the minimum of each value over all processes."""
        return [-value for value in self.all_max([-value for value in values])]

    def all(self, here: bool) -> bool:
        """Return whether `here` holds in every process."""
        return self.all_min([float(here)]) == [1.0]

    def reason(self, own: str, patience: float | None = None) -> str:
        """Return `own`, else the first reason of another process, after its rank; empty if none has one.

        Raise `RankFailedError` if others did not call within `patience` seconds, or the timeout of the group.
        """
        if self.count == 1:
            return own
        text = own.encode()[:_REASON_BYTES]
        texts = torch.zeros(self.count, _REASON_BYTES, dtype=torch.uint8)
        texts[distributed.get_rank(), : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = self._reduce(texts, patience).tolist()
        reasons = (bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows)
        return own or next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")

    def first_reason(self, why_not: Callable[[], str]) -> str:
        """Return the `reason` of `why_not`; an exception in it is a reason to the others, and is raised here."""
        with self._failure_told(None):
            own = why_not()
        return self.reason(own)

    @contextmanager
    def propagate_failures(self, patience: float | None = None) -> Iterator[None]:
        """Leave the context with an exception in every process if one raises: here or, by its rank, a `RuntimeError`.

        Args:
            patience: seconds that a process which failed waits for the others. If they are in a collective that it has
                left, it raises `RankFailedError`: the run has to end. None: the context has no collective.
        """
        with self._failure_told(patience):
            yield
        if theirs := self.reason(""):
            raise RuntimeError(theirs)

    @contextmanager
    def _failure_told(self, patience: float | None) -> Iterator[None]:
        try:
            yield
        except RankFailedError:
            raise
        except Exception as error:
            summary = f"{type(error).__name__}: {describe(error)}"
            try:
                self.reason(summary, patience)
            except RankFailedError:
                raise RankFailedError(
                    f"rank {distributed.get_rank()}: {summary}; the other processes wait for this one in a collective "
                    "that it has left, so the run ends"
                ) from error
            raise


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of `model` that gather their parameters by themselves, itself first; none without FSDP 2."""
    # By two methods of `FSDPModule`: torch builds without FSDP stay importable.
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]


def layer_units(model: nn.Module) -> list[Any]:
    """Return the decoder layers of `model` that gather their parameters by themselves."""
    checkpointing = [unit for unit in fsdp_modules(model) if hasattr(unit, "gradient_checkpointing")]
    return [unit for unit in checkpointing if not hasattr(unit, "get_input_embeddings")]


def reshard_all(model: nn.Module) -> None:
    """Free parameters that stay gathered after a forward pass without a backward pass."""
    for unit in fsdp_modules(model):
        unit.reshard()


def local(parameter: Any) -> Tensor:
    """Return the part of a parameter that this process holds, detached: all of it, or its shard of a DTensor."""
    with torch.no_grad():
        held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held.detach()


def gathered_bytes(model: nn.Module, itemsize: int) -> int:
    """Return the peak bytes in a step of gathered parameters, `itemsize` each, and of gradients not yet sharded.

    Two decoder layers are gathered at a time, and all outside of layers. A gradient is fp32 until it is sharded.
    """

    def size(unit: Any) -> int:
        inside = {p for inner in fsdp_modules(unit)[1:] for p in inner.parameters()}
        return sum(p.numel() * (itemsize + 4 * p.requires_grad) for p in unit.parameters() if p not in inside)

    layers = layer_units(model)
    return sum(size(unit) for unit in fsdp_modules(model) if unit not in layers) + 2 * max(map(size, layers), default=0)


def whole_bytes(layers: Sequence[nn.Module], itemsize: int) -> int:
    """Return the bytes of the gathered parameters of `layers`, with `itemsize` bytes per floating-point number."""
    parameters = [p for layer in layers for p in layer.parameters()]
    return sum(p.numel() * (itemsize if p.is_floating_point() else p.element_size()) for p in parameters)


@contextmanager
def keep_unsharded(layers: Sequence[Any]) -> Iterator[None]:
    """Keep the parameters of `layer_units` gathered from their forward pass in this context to their backward pass.

    That shards them again, or the end of the context: past an optimizer step they would have the values from before it.
    """
    for layer in layers:
        layer.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()


def embeddings_put_in(model: nn.Module, leaf: Tensor) -> AbstractContextManager[Any]:
    """Make the decoder of `model` begin with a copy of `leaf`, (rows, tokens, hidden), whatever tokens it is given."""
    embedding: nn.Module = text_model(model).get_input_embeddings()
    # A copy, since some families scale their embeddings in place.
    return embedding.register_forward_hook(lambda _module, _args, out: leaf.to(out.device, out.dtype, copy=True))


def head_sees_last(model: nn.Module) -> AbstractContextManager[Any]:
    """Let the head of `model` compute logits of the last token only, if it has one."""
    # `logits_to_keep` would have gemma4 cut the queries of layers whose keys are those of the whole row.
    head: nn.Module | None = text_model(model).get_output_embeddings()
    return nullcontext() if head is None else head.register_forward_pre_hook(lambda _, given: given[0][:, -1:])
