"""The fields that our configs add to TRL's, most ``"auto"`` by default; imports nothing heavy."""

# ruff: noqa: RUF009 - `choice` and `option` return fields
from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fastpack_trl.errors import check_counts, did_you_mean, short_repr
from fastpack_trl.report import disabled_by_environment

PackedAttentionPath = Literal["auto", "varlen", "per_document", "flash_attention_4", "xformers", "sdpa", "off"]
Switch = Literal["auto", "on", "off"]


def normalise_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return ``on``/``off`` for ``true``/``false`` (YAML's reading of an unquoted ``on``/``off``); check the rest.

    A feature without the value ``on`` reads it as ``auto``: switched on, path chosen by us. A `ValueError` for another
    value names the nearest.
    """
    word = str(value).lower() if isinstance(value, str | bool) else ""
    word = {"true": "on", "yes": "on", "false": "off", "no": "off"}.get(word, word)
    word = "auto" if word == "on" and "on" not in choices else word
    if word in choices:
        return word
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ValueError(f"{name}={short_repr(value)} is not available: use one of {', '.join(choices)}{hint}")


class _Choice(argparse.Action):
    """An option that also takes ``true`` and ``false``, for whichever parser is made of the config (TRL's, ours)."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, choices: Iterable[str], **keywords: Any) -> None:
        keywords["type"] = partial(_chosen, dest, tuple(choices))
        super().__init__(option_strings, dest, choices=tuple(choices), **keywords)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)


def _chosen(name: str, choices: tuple[str, ...], text: str) -> str:
    try:
        return normalise_choice(name, text, choices)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}=")) from error


def option(default: Any, text: str, **metadata: Any) -> Any:
    """Return a field with its default and the one text that help, docstring and the table of the pages have of it."""
    return field(default=default, metadata={"help": text, **metadata})


choice = partial(option, action=_Choice)
"""The same of an option with choices; the annotation names them."""


def is_run(args: Any) -> bool:
    """Return whether these are the arguments of a run: fields of ours alone may be read without transformers."""
    return hasattr(args, "per_device_train_batch_size")


_CUDA_GRAPH = """Replay the decoder as CUDA graphs, forward and backward, one pair per row size: auto (if the device \
is idle for 10 percent of an eager step, and enough steps are left), on (without these conditions), or off. The loss \
stays eager. Costs the activations of one micro-batch, held for the run."""


@dataclass
class ModelSettings:
    """The fields of every trainer: they concern its model, its rows and its files."""

    packed_attention: PackedAttentionPath = choice(
        "auto",
        "How packed documents are kept apart: auto (the fastest correct path), varlen (torch's flash kernel: CUDA, "
        "bf16 or fp16), per_document (one attention call per document, any device), flash_attention_4 or xformers "
        "(if installed), sdpa (a dense mask per batch, total_tokens^2 bytes per window) or off (TRL's attention).",
    )
    verify_packing: Switch = choice(
        "auto",
        "Check before the first rows that packed documents do not attend to each other, and pad them if they do, or "
        "stop if packed_attention names a path: auto (if documents are packed), on (stop too if the check cannot run) "
        "or off. Costs a few passes over a few dozen tokens; with sliding windows two more over up to 1,055.",
    )
    lora: Switch = choice(
        "auto",
        "Run LoRA layers in fewer kernels, those that share an input (q, k, v) together: auto (where supported), on or "
        "off (PEFT's forward). Parameters and files are PEFT's. On CUDA, dequantized or cast base weights are cached "
        "for 2 bytes per weight, if all of them fit in an eighth of the free memory.",
    )
    frozen_base: Literal["as_loaded", "fp8"] = choice(
        "as_loaded",
        "Multiply frozen base weights under LoRA as loaded (as_loaded) or in FP8 (fp8: e4m3, one scale per row), "
        "forward and backward, on CUDA from Ada and Hopper on. fp8 changes what is computed, and costs 1 byte per "
        "weight in addition to the loaded weights.",
    )
    moe: Switch = choice(
        "auto",
        "Sort the tokens of a mixture of experts once per layer and pass, also for LoRA on expert stacks: "
        "auto (replaces grouped_mm), on (replaces any experts_implementation) or off. The routing plan takes 12 "
        "bytes per token and chosen expert.",
    )
    fused_layers: Switch = choice(
        "auto",
        "Run norms, rotations of queries and keys, and gated activations in one kernel each, forward and backward, in "
        "modules that pass a comparison with their own forward: auto (on CUDA from Ampere on), on (any device; torch's "
        "operators on a CPU) or off. Keeps their inputs and one number per row for backward.",
    )
    vision_tower: Switch = choice(
        "auto",
        "Run the attention of image encoders (Qwen2-VL to Qwen3.5, GLM-4V and others) over all images at once, with "
        "lengths read once per batch: auto (where a comparison with their own loop passes), on or off. One kernel per "
        "layer on CUDA in half precision, else one call per image.",
    )
    moe_quantize_experts: Literal["off", "on"] = choice(
        "off",
        "Store frozen expert stacks in 4 bits (NF4) under LoRA: on or off. Changes what is computed, as QLoRA does. "
        "Takes about 0.53 bytes per weight, and one dense stack while it is used. Needs bitsandbytes; the model is "
        "loaded in its own dtype first.",
    )
    activation_memory: Literal["auto", "keep", "checkpoint", "offload", "off"] = choice(
        "auto",
        "What decoder layers keep for backward: keep (all activations), checkpoint (their input), offload (their "
        "input, in host memory), auto (as much as fits, on CUDA) or off (as gradient_checkpointing says). "
        "Recomputing all layers costs up to a third of a step; auto costs three forward passes over up to 192 tokens.",
    )
    activation_memory_gib: float | None = option(
        None,
        "GPU memory for activations under activation_memory, in GiB; none: what is free after model, gradients and "
        "optimizer state, less a tenth; if a step cannot run again, less a fifth, or a third with images.",
    )
    checkpoint_offload: Literal["auto", "double_buffer", "single_buffer", "off"] = choice(
        "auto",
        "Offload the inputs of checkpointed layers to pinned host memory: double_buffer (the next one arrives while "
        "a layer is recomputed), single_buffer, off, or auto (if memory requires it). Moves layers x tokens x "
        "hidden x itemsize bytes from the GPU to the host.",
    )
    save_report: Literal["on", "off"] = choice(
        "on",
        "Write fastpack_report.json to the output folder, and a section of TRL's model card, if "
        "TRL writes one: on or off.",
    )

    def __post_init__(self) -> None:
        self.normalise()
        if is_run(self):  # TRL's config follows in the order of the classes
            check_counts(self)
            super().__post_init__()  # type: ignore[misc]

    def normalise(self) -> None:
        """Check every field, and write the values that stand for others (YAML's ``true``) as features compare them."""
        for name, choices in _CHOICES.items():
            if hasattr(self, name):
                setattr(self, name, normalise_choice(name, getattr(self, name), choices))
        if self.moe_quantize_experts == "on" and self.moe == "off":
            raise ValueError("moe_quantize_experts='on' needs moe='auto' or 'on': PEFT cannot train 4-bit experts")
        if (gib := self.activation_memory_gib) is not None:
            try:
                self.activation_memory_gib = -1.0 if isinstance(gib, bool) else float(gib)
            except (TypeError, ValueError):
                self.activation_memory_gib = -1.0
            if not 0 < self.activation_memory_gib < math.inf:
                raise ValueError(f"activation_memory_gib={short_repr(gib)} must be a number above 0 (GiB), or left out")


@dataclass
class Settings(ModelSettings):
    """The fields that `FastSFTConfig` adds to TRL's `SFTConfig`: those of all trainers, and those of the SFT step."""

    cuda_graph: Switch = choice("auto", _CUDA_GRAPH)
    sync_free: Switch = choice(
        "auto",
        "No host-device synchronization between two logs (loss, metrics, NaN filter): auto (if the run permits), on "
        "(require all three) or off. Costs 12 bytes per micro-batch between two logs, and a tile of at most 2^27 "
        "logits (2^28 if the head is trained).",
    )
    merge_accumulation: Switch = choice(
        "auto",
        "Run the micro-batches of an optimizer step as fewer, longer rows: auto (rows of up to 8,192 tokens on "
        "CUDA, of 512 KiB of hidden states on a CPU), on (one row) or off. Costs the activations of the longer row, "
        "as far as free memory allows; rows are halved if one runs out of memory.",
    )
    share_prefixes: Switch = choice(
        "auto",
        "Compute a prefix that documents share only once per row: auto (if a sample of rows saves more than 5 "
        "percent of its tokens), on or off. Same loss and gradients. Needs sync_free, and no dropout (lora_dropout "
        "included).",
    )

    vision_rows: Switch = choice(
        "auto",
        "Join each batch of images and text into one row without padding, in the data loader's workers: "
        "auto (in families whose rows were compared with padded batches), on (so too, or stop) or off. Same loss and "
        "gradients.",
    )
    image_row_tokens: int | None = option(
        None,
        "Pack samples with images across the data set into rows of at most so many tokens; none: one row per batch of "
        "TRL. Such a row counts as one example of a batch. Longer samples are left out, and counted. Costs one cached "
        "pass of the processor over the data set.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_run(self):
            check_fields(self, self)

    def normalise(self) -> None:
        super().normalise()
        tokens = self.image_row_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ValueError(f"image_row_tokens={short_repr(tokens)} must be a number of tokens >= 1, or left out")
        if tokens is not None and self.vision_rows == "off":
            raise ValueError(f"image_row_tokens={tokens} needs vision_rows='auto' or 'on'")

    @classmethod
    def of(cls, args: Any, training: bool = True) -> Settings:
        """Return `args` itself if it is a `FastSFTConfig`; else its fields of these names, or their defaults.

        They are checked again, because a field may have been set after the config was made; those of the backward
        pass only for `training`.
        """
        values: dict[str, Any] = {own.name: getattr(args, own.name, own.default) for own in fields(cls)}
        found = args if isinstance(args, cls) else cls(**values)
        found.normalise()
        if training and is_run(args):
            check_fields(args, found)
        return found

    def get(self, feature: str) -> Any:
        """Return the field of a feature; ``auto`` for one that has none."""
        return getattr(self, feature, "auto")

    def is_explicit(self, feature: str) -> bool:
        """Return whether a feature was switched on by name: its field is neither its default nor ``off``."""
        own = type(self).__dataclass_fields__.get(feature)
        return own is not None and self.get(feature) not in (own.default, "off")


@dataclass
class RowSettings(ModelSettings):
    """The fields of a trainer whose batches become rows with shared prompts."""

    share_prefixes: Switch = choice(
        "auto",
        "Compute a prompt once for all its completions in a batch: auto and on (if the attention path supports it and "
        "all dropout, lora_dropout included, is 0), or off (the prompt is repeated). Same loss and gradients.",
    )
    cuda_graph: Switch = choice("auto", f"{_CUDA_GRAPH} One process.")


@dataclass
class OnlineSettings(RowSettings):
    """The fields of a trainer that generates."""

    merge_accumulation: Switch = choice(
        "auto",
        "Run the micro-batches of an optimizer step forward together, so that completions that TRL has shuffled apart "
        "share their prompt: auto and on (on one process, without images or an auxiliary loss of experts, if memory "
        "permits) or off. Costs the activations of the whole step.",
    )


_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(Settings).items() if get_origin(hint) is Literal
}
"""Fields with choices, and those, as the annotations name them."""


def check_fields(args: Any, settings: Settings) -> None:
    """Check that fields and arguments do not contradict each other. ``FASTPACK_DISABLE=1`` reads no field."""
    if not disabled_by_environment():
        from fastpack_trl.model.recompute import check_recompute

        check_recompute(args, settings.activation_memory, settings.checkpoint_offload)
