"""The switch `layer_compile` of `FastSFTTrainer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastpack_trl.attention.backends import RIGHT_PADDED
from fastpack_trl.compile.layers import CompiledLayers, compiled_layers
from fastpack_trl.config import setting_of

FEATURE = "layer_compile"


@contextmanager
def layer_compile(trainer: Any) -> Iterator[None]:
    """Decoder layers compiled once per kind, while the model trains; after `lora`, whose layers are compiled then."""
    report = trainer.fastpack_report
    if not trainer.fastpack_trains:
        yield
        return
    why = _not_compiled(trainer)
    if why:
        report.add(FEATURE, "off", "eager", why)
        yield
        return

    def tell(layers: CompiledLayers) -> None:
        report.add(FEATURE, "stock" if layers.path == "eager" else "on", layers.path, layers.reason)

    with compiled_layers(
        trainer.model,
        measure=setting_of(trainer.args, FEATURE) == "auto",
        on_change=tell,
        verbose=trainer.is_world_process_zero(),
    ) as layers:
        tell(layers)
        yield


def _not_compiled(trainer: Any) -> str:
    """Why no layer is compiled; empty where some are."""
    setting, args = setting_of(trainer.args, FEATURE), trainer.args
    plugin = getattr(trainer.accelerator.state, "dynamo_plugin", None)
    device = trainer.accelerator.device.type
    reasons = {
        "switched off": setting == "off",
        "torch_compile=True compiles the whole model": bool(args.torch_compile),
        "accelerate compiles the whole model": plugin is not None and plugin.backend.value != "NO",
        "stock's batches have no packed metadata": trainer.fastpack_report["batches"].status != "on",
        f"{RIGHT_PADDED} has another shape for every batch": trainer.fastpack_report["packed_attention"].path
        == RIGHT_PADDED,
        # Windows, sinks or softcaps would be plain torch per document: right, and nothing to gain from.
        f"per_document on {device} calls a kernel per document, which is no part of a graph": device != "cpu"
        and trainer.fastpack_report["packed_attention"].path == "per_document",
        "parameters are sharded while the step runs": trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        f"on {device} compiling takes longer than most runs; layer_compile='on' compiles": setting == "auto"
        and device == "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
