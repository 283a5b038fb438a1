"""The features that `FastSFTTrainer` enters around a run, in order. Each has the name of its field of the config."""

from __future__ import annotations

from fastpack_trl.checkpointing.activation_memory import activation_memory
from fastpack_trl.checkpointing.checkpoint_offload import checkpoint_offload
from fastpack_trl.compile.layer_compile import layer_compile
from fastpack_trl.lora.cache_dequantized import cache_dequantized
from fastpack_trl.lora.frozen_base import frozen_base
from fastpack_trl.lora.lora import lora
from fastpack_trl.moe.moe import moe
from fastpack_trl.run import Feature
from fastpack_trl.step.aux_loss import aux_loss
from fastpack_trl.step.cuda_graph import cuda_graph
from fastpack_trl.step.merge_accumulation import merge_accumulation
from fastpack_trl.step.sync_free import sync_free

BEFORE_ATTENTION: tuple[Feature, ...] = (moe,)
"""Entered before the packing proof runs the model: on four-bit experts PEFT's own forward would fail."""

AFTER_ATTENTION: tuple[Feature, ...] = (
    lora,
    frozen_base,  # of the layers of `lora`; changes the memory that is left to plan
    sync_free,
    aux_loss,  # says whether the loss of `sync_free` has it
    activation_memory,
    cache_dequantized,  # in what that plan leaves
    checkpoint_offload,  # unless that plan offloads
    merge_accumulation,  # needs the loss of `sync_free`
    layer_compile,  # compiles what all the others have installed
    cuda_graph,  # records what all the others run
)
"""Entered from first to last when `train`, `evaluate` or `predict` begins, left in the opposite order."""
