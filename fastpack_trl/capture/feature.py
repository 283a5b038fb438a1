"""The feature `cuda_graph`: whether micro-steps of a run can be captured, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TypeVar

import torch

from fastpack_trl.capture.ddp import reduced_apart, too_large
from fastpack_trl.capture.decision import EAGER_STEPS, FEATURE, GraphDecision
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.graphs import StepGraphs
from fastpack_trl.capture.rows import RowGraphs
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import callbacks_added, during_training, patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointing_modules, checkpoints_reentrantly
from fastpack_trl.model.hooks import BATCH_METHODS, hook_inside, hook_on_a_gradient, replaced_methods
from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.run import DEEPSPEED, SHARDED, Run
from fastpack_trl.step.merge_accumulation import rope_follows_length
from fastpack_trl.step.token_logps import Rows

LEAST_CAPABILITY = (8, 0)

_Graphs = TypeVar("_Graphs", bound=GraphDecision)


class _Apart:
    """Marks a run that trains on a stream of its own from its start."""


@contextmanager
def side_stream(run: Run) -> Iterator[None]:
    """Make several processes train on a stream of their own where steps may be captured, before DDP is made.

    Autograd's nodes that add to gradients belong to the stream that they were made on, and DDP keeps those that it
    finds or makes; one of another stream ends a recording in backward (cudaErrorStreamCaptureIsolation).
    """
    alone = run.trainer.accelerator.num_processes == 1 or run.is_sharded or run.is_deepspeed
    if alone or not run.training or any(_switch(run)) or unavailable(run.device) or too_large(run):
        yield
        return
    with _apart(run, CudaGraphs(run.device)), run.keeping(_Apart()):
        yield


@contextmanager
def _apart(run: Run, device: CudaGraphs) -> Iterator[None]:
    with device.run_apart(), _steps_in_order(run, device):
        yield


@contextmanager
def cuda_graph(run: Run) -> Iterator[None]:
    """Capture forward, loss and backward of a micro-batch once per bucket of rows, and replay it for those that fit.

    Graphs hold the activations of a micro-step beside those of eager ones, e.g. of rows without a bucket. Where the
    plan of the activations does not leave as much, nothing is recorded, and no layer recomputed instead: that costs
    large models more than graphs gain, and beside a small one there is mostly room for both.
    """
    reasons = partial(why_not, run)

    def make(device: CudaGraphs, asked: bool) -> StepGraphs:
        return StepGraphs(run, device, reasons, asked=asked)

    with _graphs(run, make, reasons) as graphs, reduced_apart(run, graphs):
        yield


@contextmanager
def row_graphs(run: Run, rows: Rows, dropout: str, draw: Callable[[], list[RowSize]]) -> Iterator[None]:
    """Capture forward and backward of the layers, for trainers whose losses ask the device; see `RowGraphs`.

    Args:
        run: of such a trainer.
        rows: that its models run on.
        dropout: which dropout the model has; empty where it has none.
        draw: returns sizes of rows as they will come.
    """

    def reasons() -> str:
        stock = not run.packs and "stock's batches have no packed metadata"
        several = _is_several(run) and "several processes reduce their gradients inside of the micro-step"
        drawn = dropout and f"{dropout} is drawn in the forward and again in a recompute"
        return first_reason(chain(_switch(run), (several, stock, drawn), _reasons_of_layers(run)))

    def make(device: CudaGraphs, asked: bool) -> RowGraphs:
        return RowGraphs(run, device, reasons, draw, asked=asked)

    with _graphs(run, make, reasons) as graphs, patch_attribute(rows, "replay", graphs and graphs.hidden):
        yield


@contextmanager
def _graphs(
    run: Run, make: Callable[[CudaGraphs, bool], _Graphs], why_not: Callable[[], str]
) -> Iterator[_Graphs | None]:
    """Record and replay by what `make` returns while the model trains; None where that cannot be, which is said."""
    why = "" if not run.training else run.ranks.first_reason(lambda: unavailable(run.device) or why_not())
    if why or not run.training:
        if why:
            run.set_status(FEATURE, "off", "eager", why)
        yield None
        return
    device = CudaGraphs(run.device)
    asked = run.settings.cuda_graph == "on"
    graphs = make(device, asked)
    weighed = "" if asked else ", if the device waits for the host there"
    run.set_status(FEATURE, "on", "pending", f"from step {EAGER_STEPS + 1} on{weighed}")
    try:
        apart: AbstractContextManager[None] = nullcontext() if run.get_state(_Apart) else _apart(run, device)
        with callbacks_added(run.trainer, graphs), apart, run.keeping(graphs):
            yield graphs
    finally:
        graphs.finish()


@contextmanager
def _steps_in_order(run: Run, device: CudaGraphs) -> Iterator[None]:
    """Order the steps of an optimizer of bitsandbytes, which launches them on the default stream, once it is there."""
    with ExitStack() as ordered:

        def order() -> None:
            ordered.close()  # `train` may begin again by itself, with smaller batches
            optimizer = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)  # inside of accelerate's
            if any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__):
                ordered.enter_context(device.steps_in_order(optimizer))

        with during_training(run.trainer, at_begin=order):
            yield


def unavailable(device: torch.device) -> str:
    """Return why a device records no graphs; empty where it does."""
    if device.type != "cuda":
        return f"the model is on {device}: its work is not queued by a host that a graph could relieve"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"needs compute capability {_dotted(LEAST_CAPABILITY)}, this device has {_dotted(capability)}"
    return ""


def why_not(run: Run) -> str:
    """Return why micro-steps of this run are not captured; empty where they may be."""
    whole = _is_several(run) and too_large(run)
    return first_reason(chain(_switch(run), _reasons_of_step(run), _reasons_of_layers(run), (whole,)))


def _switch(run: Run) -> Iterator[object]:
    yield run.settings.cuda_graph == "off" and "switched off"


def _is_several(run: Run) -> bool:
    return bool(run.trainer.accelerator.num_processes > 1)


def _reasons_of_step(run: Run) -> Iterator[object]:
    """Yield why the loss and metrics of SFT's step are not recorded."""
    trainer = run.trainer
    yield not run.loss_is_ours and "a loss over all logits reads sizes on the host (sync_free)"
    mean = not trainer.model_accepts_loss_kwargs or getattr(trainer, "loss_is_scaled_for_ga", None) is False
    yield mean and "the loss is a mean per micro-batch"
    replaced = replaced_methods(trainer, BATCH_METHODS)
    yield replaced and f"{replaced} may look into the micro-step"


def _reasons_of_layers(run: Run) -> Iterator[object]:
    """Yield why forward and backward of the layers of a model are not recorded, whatever its trainer."""
    args, model = run.args, run.model
    checkpointing = args.gradient_checkpointing_kwargs or {}
    yield run.refuses_static(Bucket(1, 1, 1, 1))
    yield run.is_sharded and SHARDED
    yield run.is_deepspeed and DEEPSPEED
    yield args.n_gpu > 1 and "several devices in one process"
    yield args.fp16 and "the loss scaler of fp16 asks the device"
    offloads = run.step.offloads or getattr(args, "activation_offloading", False) or checkpointing.get("offload")
    yield offloads and "layer inputs go to host memory in the micro-step"
    reentrant = any(map(checkpoints_reentrantly, checkpointing_modules(model)))  # known once training has begun
    yield reentrant and "use_reentrant=True runs backward in backward"
    yield args.neftune_noise_alpha and "NEFTune draws noise in a hook"
    empties = args.torch_empty_cache_steps
    yield empties and f"torch_empty_cache_steps={empties} empties memory inside of the micro-step"
    optim = str(getattr(args.optim, "value", args.optim)).lower()
    yield "lomo" in optim and f"optim={optim!r} steps in the backward pass"
    yield rope_follows_length(model) and "the rotary embedding depends on the longest document of a row"
    yield run.experts_refuse_capture()
    watched = hook_on_a_gradient(model, model.parameters()) or hook_inside(model)
    yield watched and f"{watched} does not run in a replay"
    held, left = run.step.activation_bytes / 2**30, run.step.activations_left
    lacks = left is not None and left < run.step.activation_bytes
    yield lacks and f"graphs hold {held:.1f} GiB beside an eager step, the plan leaves {(left or 0) / 2**30:.1f}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
