"""The ordered list of features, which are installed on a model and its trainer around a run."""

from __future__ import annotations

from fastpack_trl.features import (
    activation_memory,
    checkpoint_offload,
    cuda_graph,
    frozen_base,
    fused_layers,
    lora,
    merge_accumulation,
    moe,
    packed_attention,
    save_report,
    share_prefixes,
    sync_free,
    vision_rows,
    vision_tower,
)
from fastpack_trl.features.feature import Feature
from fastpack_trl.model.precision import four_bit_layout

FEATURES: tuple[Feature, ...] = (
    Feature("four_bit_layout", four_bit_layout, falls_back=False),
    # It also restores after the packing check and the plan.
    Feature("side_stream", cuda_graph.side_stream, concerns=cuda_graph.needs_side_stream, kinds=("sft",),
            falls_back=False),
    # On four-bit experts PEFT's own forward would fail in the packing check.
    Feature("moe", moe.install, moe.why_not, moe.concerns, has_off=False),
    Feature("packed_attention", packed_attention.install, has_off=False, falls_back=False),
    # Of the rows that it plans.
    Feature("vision_rows", vision_rows.install, vision_rows.why_not, vision_rows.concerns, kinds=("sft",),
            reads_data=True),
    # Keeps copies of frozen weights before memory is planned.
    Feature("lora", lora.install, lora.why_not, lora.concerns, in_training=True, instead="PEFT"),
    # Of the layers of `lora`; changes the memory that is left to plan.
    Feature("frozen_base", frozen_base.install, frozen_base.why_not, frozen_base.concerns, in_training=True),
    # Around the layers of `lora`; changes what a layer keeps, which the plan counts.
    Feature("fused_layers", fused_layers.install, fused_layers.why_not, in_training=True),
    Feature("vision_tower", vision_tower.install, vision_tower.why_not, vision_tower.concerns),
    Feature("sync_free", sync_free.install, sync_free.why_not, kinds=("sft",)),
    # Needs the loss of `sync_free`, and the attention.
    Feature("share_prefixes", share_prefixes.install, share_prefixes.why_not, share_prefixes.concerns,
            instead="not shared"),
    Feature("activation_memory", activation_memory.install, activation_memory.why_not, in_training=True),
    # Unless that plan offloads.
    Feature("checkpoint_offload", checkpoint_offload.install, checkpoint_offload.why_not, in_training=True),
    # Needs the loss of `sync_free`.
    Feature("merge_accumulation", merge_accumulation.install, merge_accumulation.why_not, kinds=("sft", "online"),
            in_training=True),
    # Records what all the others run.
    Feature("cuda_graph", cuda_graph.install, cuda_graph.why_not, in_training=True, instead="eager"),
    Feature("save_report", save_report.install, concerns=save_report.concerns, in_training=True, falls_back=False),
)  # fmt: skip
"""Entered in this order when `train`, `evaluate` or `predict` begins, and left in reverse order."""


def feature(name: str) -> Feature:
    """Return the feature of an option."""
    return next(each for each in FEATURES if each.name == name)
