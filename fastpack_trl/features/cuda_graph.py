"""The option `cuda_graph`: the backbone as CUDA graphs, and the stream that several processes need for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fastpack_trl.capture.ddp import reducing_gradients, too_large
from fastpack_trl.capture.decision import EAGER_STEPS, FEATURE
from fastpack_trl.capture.decoder import refusals as refusals_on_images
from fastpack_trl.capture.decoder import replayed_decoder
from fastpack_trl.capture.device import CudaGraphs, on_side_stream
from fastpack_trl.capture.graphs import LOSS_METHODS, BackboneGraphs, plan_lacks_room
from fastpack_trl.checkpointing.tower import tower_layers
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import callbacks_added, patch_attribute
from fastpack_trl.model.checkpoint_seam import (
    checkpointable_layers,
    checkpointing_modules,
    checkpoints_reentrantly,
)
from fastpack_trl.model.facts import dropout_of, drops_layers
from fastpack_trl.model.hooks import replaced_methods
from fastpack_trl.packing.batching import has_images
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.run import Run, looks_inside

LEAST_CAPABILITY = (8, 0)


def needs_side_stream(run: Run) -> bool:
    """Return whether several processes may capture steps.

    Autograd's nodes that add to gradients belong to the stream that they were made on, and DDP keeps those that it
    finds or makes; one of another stream ends a recording in backward (cudaErrorStreamCaptureIsolation).
    """
    alone = run.trainer.accelerator.num_processes == 1 or run.is_sharded or run.is_deepspeed
    off = run.settings.cuda_graph == "off" or run.args.fp16 or unavailable(run.device) or too_large(run)
    return run.training and not alone and not off


@contextmanager
def side_stream(run: Run) -> Iterator[None]:
    """Make several processes train on a stream of their own where steps may be captured, before DDP is made."""
    with on_side_stream(run, CudaGraphs(run.device)), patch_attribute(run, "has_side_stream", True):
        yield


def why_not(run: Run) -> Iterator[object]:
    """Yield why the backbone of this run is not captured."""
    yield unavailable(run.device)
    yield from refusals(run)


def unavailable(device: torch.device) -> str:
    """Return why a device records no graphs, or ``""``."""
    if device.type != "cuda":
        return f"the model is on {device}: CUDA graphs need a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"needs compute capability {_dotted(LEAST_CAPABILITY)}, this device has {_dotted(capability)}"
    return ""


def refusals(run: Run) -> Iterator[object]:
    """Yield why the backbone is not captured, whatever the device. It may change in the middle of a run."""
    yield from _reasons_of_trainer(run)
    yield from _reasons_of_layers(run)


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Record the backbone once per bucket of rows, and replay it for rows that fit, while the model trains.

    Graphs hold the activations of a micro-step in addition to those of eager ones, e.g. of rows without a bucket. If
    the plan of the activations does not leave as much, nothing is recorded, and no layer recomputed instead: that costs
    large models more than graphs gain, and beside a small one there is mostly room for both. Of steps on images, each
    of which has a plan, three of four have to leave as much.
    """
    device, insists = CudaGraphs(run.device), run.settings.cuda_graph == "on"
    of_images = has_images(run.trainer)
    layers, towers = len(checkpointable_layers(run.model)), len(tower_layers(run.model)) if of_images else 0
    share = layers / (layers + towers) if towers else 1.0
    graphs = BackboneGraphs(run, device, lambda: first_reason(refusals(run)), insists=insists, share=share)
    weighed = "" if insists else ", if the device waits for the host there"
    run.set_status(FEATURE, "on", "pending", f"from step {EAGER_STEPS + 1} on{weighed}")
    streamed: AbstractContextManager[None] = nullcontext() if run.has_side_stream else on_side_stream(run, device)
    replaying, held = patch_attribute(run.backbone, "replay", graphs.run), patch_attribute(run, "graphs", graphs)
    reducing = reducing_gradients(run, graphs) if run.ranks.count > 1 else nullcontext()
    below = replayed_decoder(run) if of_images else nullcontext()
    try:
        with callbacks_added(run.trainer, graphs), streamed, held, replaying, below, reducing:
            yield
    finally:
        graphs.finish()


def _reasons_of_trainer(run: Run) -> Iterator[object]:
    """Yield why a trainer's calls of its backbone are not recorded."""
    trainer = run.trainer
    is_several = trainer.accelerator.num_processes > 1
    if has_images(trainer):
        yield from refusals_on_images(run)
    if run.kind == "sft":
        yield not run.loss_is_ours and "a loss over all logits reads sizes on the host (sync_free)"
        yield is_several and too_large(run)
    else:
        yield is_several and "several processes reduce their gradients inside of the micro-step"
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
    usual = run.step.is_recordable  # else other steps are
    offloads = getattr(args, "activation_offloading", False) or checkpointing.get("offload")
    yield (offloads or (usual and run.step.offloads)) and "layer inputs go to host memory in the micro-step"
    reentrant = any(map(checkpoints_reentrantly, checkpointing_modules(model)))  # known once training has begun
    yield reentrant and "use_reentrant=True runs backward in backward"
    recomputes = usual and any(module.gradient_checkpointing for module in checkpointing_modules(model))
    drawn = recomputes and dropout_of(model)
    yield drawn and f"{drawn} is drawn in the forward and again in a recompute"
    yield drops_layers(model) and "layerdrop: each replay would drop the layers that the recording dropped"
    empties = args.torch_empty_cache_steps
    yield empties and f"torch_empty_cache_steps={empties} empties memory inside of the micro-step"
    yield from looks_inside(run)
    yield run.refuses_experts(run.device)
    yield not run.step.by_step and plan_lacks_room(run)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
