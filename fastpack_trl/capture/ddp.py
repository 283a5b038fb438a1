"""Gradients of several processes under DDP, reduced at once after the last micro-step of an optimizer step.

DDP reduces inside of the backward pass: a recording would hold the reductions, and all processes would have to replay
at the same time. Here each micro-step, eager, recorded or replayed, runs under ``model.no_sync()``, from a step on that
all processes agree on; then one all-reduce per dtype follows. So how a process runs its rows is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from fastpack_trl.capture.decision import EAGER_STEPS
from fastpack_trl.capture.graphs import BackboneGraphs
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import callbacks_added, patch_attribute
from fastpack_trl.run import Run

_MOST_BYTES = 512 << 20
"""Of gradients. Adapters have less (168 MB for all projections of 8B at rank 16); their all-reduce takes some 2 ms over
NVLink at most. Those of a whole model are better reduced beside the backward pass, as DDP does."""


class FlatReduce(TrainerCallback):
    """Reduces the gradients of a model under DDP between its micro-steps, once all processes agree to.

    Args:
        run: of several processes.
        graphs: of this process; disabled where the processes do not agree.
    """

    def __init__(self, run: Run, graphs: BackboneGraphs) -> None:
        self._run, self._graphs = run, graphs
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._first, self.is_pending, self._is_first = step, True, False
        self._parameters: list[nn.Parameter] = []
        self._trained: set[nn.Parameter] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with DDP's own reduction: the model may be wrapped anew."""
        self._begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Agree with the other processes at the end of the last step before any is recorded: gradients are there."""
        if not self.is_pending or state.global_step - self._first < EAGER_STEPS - 1:
            return
        self.is_pending = False
        model = self._run.trainer.model_wrapped
        if why := self._run.ranks.first_reason(lambda: first_reason(self._why_not(model))):
            self._graphs.disable(why)
        else:
            self._parameters, self._is_first = _reduced(model), True

    @torch.no_grad()
    def _reduce(self, group: Any) -> None:
        """Set each gradient to its mean over the processes; one that is missing here counts as zeros."""
        self._trained.update(parameter for parameter in self._parameters if parameter.requires_grad)
        trained = [parameter for parameter in self._parameters if parameter in self._trained]
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            alike = [parameter for parameter in trained if parameter.dtype == dtype]
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in alike]
            whole = torch.cat([gradient.flatten() for gradient in gradients])
            whole.mul_(1 / group.size())  # before the sum, as DDP does
            distributed.all_reduce(whole, group=group)
            parts = whole.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])
            for parameter, gradient in zip(alike, gradients, strict=True):
                if parameter.requires_grad:  # not one that was frozen since
                    parameter.grad = gradient

    def _why_not(self, model: nn.Module) -> Iterator[object]:
        yield self._graphs.has_ended and "micro-steps run eager"
        yield from _refusals(model)

    @property
    def is_on(self) -> bool:
        """Gradients are reduced between micro-steps: one may run again by itself."""
        return bool(self._parameters)

    @contextmanager
    def after(self, model: Any) -> Iterator[None]:
        """Reduce the gradients after a micro-batch in the context, where DDP would have in its backward pass."""
        if not self.is_on:
            yield
            return
        if self._is_first and model.broadcast_buffers and model.modules_buffers:
            model._sync_buffers()
        is_last = model.require_backward_grad_sync
        # DDP's forward hands out no buffers: a micro-step may run twice on one process, and a replay has no forward.
        with model.no_sync(), patch_attribute(model, "require_forward_param_sync", False):
            yield
        if is_last:
            self._reduce(model.process_group)
        self._is_first = is_last


def _reduced(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that DDP reduces while they train."""
    ignored = set(model.parameters_to_ignore)
    return [parameter for name, parameter in model.module.named_parameters() if name not in ignored]


def _refusals(model: nn.Module) -> Iterator[object]:
    """Yield why gradients of a model that training has wrapped are not reduced apart from its backward pass."""
    if not isinstance(model, DistributedDataParallel):
        yield f"{type(model).__name__}, not DDP, reduces the gradients"
        return
    hook = model._get_ddp_logging_data().get("comm_hook") or hasattr(model, "buffer_hook")
    yield hook and "DDP has a communication hook, which reduces the gradients bucket by bucket"
    yield model.static_graph and "ddp_static_graph: DDP counts the backward passes"
    yield model.gradient_as_bucket_view and "gradient_as_bucket_view: gradients are pieces of DDP's buckets"
    yield model.mixed_precision is not None and "DDP casts the parameters itself"
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    for parameter in (one for one in _reduced(model) if one.requires_grad):
        own = parameter.grad
        yield own is None and f"{names[parameter]} has no gradient in this process"
        unlike = own is not None and (own.layout != torch.strided or own.dtype != parameter.dtype)
        yield unlike and f"the gradient of {names[parameter]} is sparse, or of another dtype"


def too_large(run: Run) -> str:
    """Return why the gradients of a run are not reduced after its backward pass; empty where they may be."""
    size = sum(parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)
    if size <= _MOST_BYTES:
        return ""
    return (
        f"gradients of {size / 2**30:.1f} GiB are reduced during the backward pass, which graphs do not support: train "
        "adapters (LoRA), or in one process"
    )


@contextmanager
def reducing_gradients(run: Run, graphs: BackboneGraphs) -> Iterator[None]:
    """Let the gradients of several processes be reduced between micro-steps."""
    reduce = FlatReduce(run, graphs)
    with callbacks_added(run.trainer, reduce), patch_attribute(run, "reduce", reduce):
        yield


def reduced_after(run: Run, model: Any) -> AbstractContextManager[None]:
    """Reduce the gradients of several processes after a micro-batch, as the feature ``cuda_graph`` decides."""
    reduce: FlatReduce | None = run.reduce
    return nullcontext() if reduce is None else reduce.after(model)
