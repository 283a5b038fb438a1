"""The option `layer_compile`: decoder layers compiled while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.compile.kind import CompiledLayers
from fastpack_trl.compile.layers import compiled_layers, decoder_layers
from fastpack_trl.model.facts import masks_by_kind
from fastpack_trl.packing.batching import has_images
from fastpack_trl.report import Status
from fastpack_trl.run import SHARDED, Run

FEATURE = "layer_compile"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Compile decoder layers once per kind, while the model trains; after `lora`, whose layers are compiled then."""

    def tell(layers: CompiledLayers) -> None:
        run.step.version += 1
        status: Status = "off" if layers.unpaid else "stock" if layers.path == "eager" else "on"
        run.set_status(FEATURE, status, layers.path, layers.reason)

    weighs = run.settings.layer_compile == "auto"
    with compiled_layers(
        run.model,
        # The first step shows within seconds that the run works, and how long merged rows are.
        left=(lambda: None if run.is_in_first_step else run.steps_left()) if weighs else None,
        hooks_outside=run.is_fsdp2,
        on_change=tell,
    ) as layers:
        tell(layers)
        pending = run.step.waiting_for(lambda: any(kind.path == "pending" for kind in layers.kinds))
        with pending:
            yield


def why_not(run: Run) -> Iterator[object]:
    """Yield why no layer is compiled."""
    setting, device = run.settings.layer_compile, run.device.type
    yield run.args.torch_compile and "torch_compile=True compiles the whole model"
    plugin = getattr(run.trainer.accelerator.state, "dynamo_plugin", None)
    whole = plugin is not None and plugin.backend.value != "NO"
    yield whole and "accelerate compiles the whole model"
    yield not run.packs and "TRL's batches have no packed metadata"
    yield run.is_sharded and not run.is_fsdp2 and SHARDED
    yield not decoder_layers(run.model) and "the model has no list of decoder layers with packed attention"
    rarely = setting == "auto" and device == "cpu"
    yield rarely and (
        f"on {device} compiling takes longer than most runs; layer_compile='on' with packed_attention='sdpa' compiles"
    )
    yield run.choice.refuses_compile
    blocks = has_images(run.trainer) and masks_by_kind(run.model)
    yield blocks and "tokens of an image attend to each other in a call whose shape changes with each row"
    # Measured on an H200, ms of a settled step, fused and compiled: Qwen3-0.6B LoRA, 2,048 tokens, 26.6 and 26.8; 8,192
    # tokens, 83.5 and 86.5; 8B LoRA, 4,096 tokens, 267 and 258 to 268; all weights of Llama-3.2-1B, 74 and 71.
    fused = setting == "auto" and run.fused is not None
    yield fused and "fused_layers is as fast from the second step on; layer_compile='on' compiles"
