"""The feature `cuda_graph`: whether micro-steps of a run can be captured, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain

import torch

from fastpack_trl.capture.ddp import reducing_gradients, too_large
from fastpack_trl.capture.decision import EAGER_STEPS, FEATURE
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.graphs import LOSS_METHODS, BackboneGraphs
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import callbacks_added, during_training, patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointing_modules, checkpoints_reentrantly
from fastpack_trl.model.facts import dropout_of
from fastpack_trl.model.hooks import replaced_methods
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.run import Run
from fastpack_trl.step.loss import BackboneCall
from fastpack_trl.step.merge_accumulation import looks_inside
from fastpack_trl.step.sync_free import SyncFreeStep

LEAST_CAPABILITY = (8, 0)


class _SideStream:
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
    with _on_side_stream(run, CudaGraphs(run.device)), run.keeping(_SideStream()):
        yield


@contextmanager
def _on_side_stream(run: Run, device: CudaGraphs) -> Iterator[None]:
    with device.on_side_stream(), _steps_in_order(run, device):
        yield


@contextmanager
def cuda_graph(run: Run) -> Iterator[None]:
    """Capture the backbone of SFT's micro-batches.

    Graphs hold the activations of a micro-step in addition to those of eager ones, e.g. of rows without a bucket. If
    the plan of the activations does not leave as much, nothing is recorded, and no layer recomputed instead: that costs
    large models more than graphs gain, and beside a small one there is mostly room for both.
    """
    step = run.get_state(SyncFreeStep)
    call = BackboneCall() if step is None else step.forward.call_backbone
    with capture_backbone(run, call) as graphs, reducing_gradients(run, graphs):
        yield


@contextmanager
def capture_backbone(run: Run, call: BackboneCall) -> Iterator[BackboneGraphs | None]:
    """Record the backbone once per bucket of rows, and replay it for rows that fit, while the model trains.

    Args:
        run: of a trainer that calls its backbones by `call`.
        call: replays from then on.
    """
    why = "" if not run.training else run.ranks.first_reason(lambda: unavailable(run.device) or why_not(run))
    if why or not run.training:
        if why:
            run.set_status(FEATURE, "off", "eager", why)
        yield None
        return
    device = CudaGraphs(run.device)
    graphs = BackboneGraphs(run, device, partial(why_not, run))
    weighed = "" if run.settings.cuda_graph == "on" else ", if the device waits for the host there"
    run.set_status(FEATURE, "on", "pending", f"from step {EAGER_STEPS + 1} on{weighed}")
    try:
        streamed: AbstractContextManager[None] = (
            nullcontext() if run.get_state(_SideStream) else _on_side_stream(run, device)
        )
        replaying = patch_attribute(call, "replay", graphs.run)
        with callbacks_added(run.trainer, graphs), streamed, run.keeping(graphs), replaying:
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
    """Return why a device records no graphs, or ``""``."""
    if device.type != "cuda":
        return f"the model is on {device}: CUDA graphs need a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"needs compute capability {_dotted(LEAST_CAPABILITY)}, this device has {_dotted(capability)}"
    return ""


def why_not(run: Run) -> str:
    """Return why the backbone of this run is not captured; empty if it may be."""
    return first_reason(chain(_switch(run), _reasons_of_trainer(run), _reasons_of_layers(run)))


def _switch(run: Run) -> Iterator[object]:
    yield run.settings.cuda_graph == "off" and "switched off"


def _is_several(run: Run) -> bool:
    return bool(run.trainer.accelerator.num_processes > 1)


def _reasons_of_trainer(run: Run) -> Iterator[object]:
    """Yield why a trainer's calls of its backbone are not recorded."""
    trainer = run.trainer
    if run.counts_documents:  # SFT
        yield not run.loss_is_ours and "a loss over all logits reads sizes on the host (sync_free)"
        yield _is_several(run) and too_large(run)
    else:
        yield _is_several(run) and "several processes reduce their gradients inside of the micro-step"
        yield not run.packs and "TRL's batches have no packed metadata"
    replaced = replaced_methods(trainer, LOSS_METHODS)
    yield replaced and f"{replaced} may look into the micro-step"


def _reasons_of_layers(run: Run) -> Iterator[object]:
    """Yield why forward and backward of the layers of a model are not recorded, whatever its trainer."""
    args, model = run.args, run.model
    checkpointing = args.gradient_checkpointing_kwargs or {}
    yield run.refuses_static(Bucket(1, 1, 1))
    yield args.n_gpu > 1 and "several devices in one process"
    yield args.fp16 and "the loss scaler of fp16 synchronizes"
    offloads = run.step.offloads or getattr(args, "activation_offloading", False) or checkpointing.get("offload")
    yield offloads and "layer inputs go to host memory in the micro-step"
    reentrant = any(map(checkpoints_reentrantly, checkpointing_modules(model)))  # known once training has begun
    yield reentrant and "use_reentrant=True runs backward in backward"
    recomputes = any(module.gradient_checkpointing for module in checkpointing_modules(model))
    drawn = recomputes and dropout_of(model)
    yield drawn and f"{drawn} is drawn in the forward and again in a recompute"
    empties = args.torch_empty_cache_steps
    yield empties and f"torch_empty_cache_steps={empties} empties memory inside of the micro-step"
    yield from looks_inside(run)
    yield run.experts_refuse_capture()
    held, left = run.step.activation_bytes / 2**30, run.step.activations_left
    lacks = left is not None and left < run.step.activation_bytes
    yield lacks and f"graphs need {held:.1f} GiB on top of an eager step; the plan leaves {(left or 0) / 2**30:.1f}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
