"""The feature `cuda_graph`: whether micro-steps of a run can be captured, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fastpack_trl.errors import first_reason
from fastpack_trl.model.hooks import hook_inside
from fastpack_trl.model.user_code import BATCH_METHODS, hook_on_a_gradient, replaced_methods
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.run import DEEPSPEED, SHARDED, Run
from fastpack_trl.step.capture import EAGER_STEPS, FEATURE, StepGraphs
from fastpack_trl.step.graph_device import CudaGraphs
from fastpack_trl.step.merge_accumulation import has_dropout, rope_follows_length

LEAST_CAPABILITY = (8, 0)
LEAST_FOR_EXPERTS = (9, 0)
"""Before it torch's grouped product reads the sizes of its groups on the host."""


@contextmanager
def cuda_graph(run: Run) -> Iterator[None]:
    """Capture forward, loss and backward of a micro-batch once per bucket of rows, and replay it for those that fit.

    Graphs hold the activations of a micro-step beside those of eager ones, e.g. of rows without a bucket. Where the
    plan of the activations does not leave as much, nothing is recorded, and no layer recomputed instead: that costs
    large models more than graphs gain, and beside a small one there is mostly room for both.
    """
    if not run.training:
        yield
        return
    why = unavailable(run.device) or why_not(run)
    if why:
        run.say(FEATURE, "off", "eager", why)
        yield
        return
    device = CudaGraphs(run.device)
    graphs = StepGraphs(run, device, partial(why_not, run), asked=run.settings.cuda_graph == "on")
    weighed = "" if run.settings.cuda_graph == "on" else ", if the device waits for the host there"
    run.say(FEATURE, "on", "pending", f"from step {EAGER_STEPS + 1} on{weighed}")
    run.spares.insert(0, graphs.spare)  # graphs are made again in a second; what is dropped else stays away
    try:
        with device.run_apart(), run.keeping(graphs):
            yield
    finally:
        run.spares.remove(graphs.spare)
        graphs.finish()


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
    return first_reason(_reasons(run))


def _reasons(run: Run) -> Iterator[object]:
    trainer, args, model = run.trainer, run.args, run.model
    checkpointing = args.gradient_checkpointing_kwargs or {}
    yield run.settings.cuda_graph == "off" and "switched off"
    yield not run.loss_is_ours and "a loss over all logits reads sizes on the host (sync_free)"
    yield run.refuses_static(Bucket(1, 1, 1, 1))
    yield run.is_sharded and SHARDED
    yield run.is_deepspeed and DEEPSPEED
    several = trainer.accelerator.num_processes > 1
    yield several and "several processes reduce their gradients inside of the micro-step"
    yield args.n_gpu > 1 and "several devices in one process"
    yield args.fp16 and "the loss scaler of fp16 asks the device"
    offloads = run.offloads or args.activation_offloading or checkpointing.get("offload")
    yield offloads and "layer inputs go to host memory in the micro-step"
    yield _checkpoints(run) and has_dropout(model) and "random states of dropout are kept by checkpoints"
    reentrant = checkpointing.get("use_reentrant") and _checkpoints(run)
    yield reentrant and "use_reentrant=True runs backward in backward"
    mean = not trainer.model_accepts_loss_kwargs or getattr(trainer, "loss_is_scaled_for_ga", None) is False
    yield mean and "the loss is a mean per micro-batch"
    yield args.neftune_noise_alpha and "NEFTune draws noise in a hook"
    empties = args.torch_empty_cache_steps
    yield empties and f"torch_empty_cache_steps={empties} empties memory inside of the micro-step"
    optim = str(getattr(args.optim, "value", args.optim)).lower()
    yield "lomo" in optim and f"optim={optim!r} steps in the backward pass"
    # bitsandbytes launches them on the default stream, which does not wait for that of a captured run.
    apart = "8bit" in optim or "paged" in optim or type(trainer.optimizer).__module__.startswith("bitsandbytes")
    yield apart and f"optim={optim!r} of bitsandbytes runs on another stream"
    yield rope_follows_length(model) and "the rotary embedding depends on the longest document of a row"
    experts = run.has_experts and run.device.type == "cuda"
    low = experts and torch.cuda.get_device_capability(run.device) < LEAST_FOR_EXPERTS
    least = _dotted(LEAST_FOR_EXPERTS)
    yield low and f"grouped products read their sizes on the host before compute capability {least}"
    watched = hook_on_a_gradient(model, model.parameters()) or hook_inside(model)
    yield watched and f"{watched} does not run in a replay"
    replaced = replaced_methods(trainer, BATCH_METHODS)
    yield replaced and f"{replaced} may look into the micro-step"
    held, left = run.step_bytes / 2**30, run.activations_left
    lacks = left is not None and left < run.step_bytes
    yield lacks and f"graphs hold {held:.1f} GiB beside an eager step, the plan leaves {(left or 0) / 2**30:.1f}"


def _checkpoints(run: Run) -> bool:
    """Return whether a layer is checkpointed now; known once training has begun."""
    return any(getattr(module, "gradient_checkpointing", False) for module in run.model.modules())


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
