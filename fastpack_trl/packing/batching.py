"""Choice of a run's batches: packed rows, padding-free rows, or stock's own; with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from datasets import Dataset
from trl import SFTTrainer

from fastpack_trl.model.facts import ALORA, is_invoked_once_per_row
from fastpack_trl.model.hooks import hook_inside
from fastpack_trl.model.upstream import DataCollatorForLanguageModeling, missing_names
from fastpack_trl.model.user_code import BATCH_METHODS, replaced_methods
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.dataset import is_token_lists
from fastpack_trl.packing.rows import ArrowRows

COLUMNS = ("input_ids", "labels", "seq_lengths")
PADDING_FREE_COLUMNS = COLUMNS[:2]
"""Without packing stock reads a row as one document, whatever else the data set says."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """``packed``: stock packs or flattens, we describe it; ``padding_free``: stock pads, we flatten; ``stock``."""

    kind: Literal["packed", "padding_free", "stock"]
    reason: str


def missing_seams() -> str:
    """Return the names that the installed versions lack for our batches; empty where all are there. Else stock runs."""
    return ", ".join(missing_names("batches"))


def is_stock_collator(collator: object) -> bool:
    """Return whether a collator is exactly TRL's own for text; a subclass may do something that ours does not."""
    return type(collator) is DataCollatorForLanguageModeling


def joins_documents(trainer: SFTTrainer) -> bool:
    """Return whether TRL's collator was set up without ``padding_free``: each packed row would be one document."""
    collator = trainer.data_collator
    return bool(is_stock_collator(collator) and trainer.padding_free and not collator.padding_free)


def plan_batches(trainer: SFTTrainer, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
    """Return the batches of a run.

    Args:
        trainer: constructed.
        path: of attention, chosen for its model.
        flattens: rows without padding suit that path.
        unproven: why nothing has shown that the model keeps documents apart in such rows; empty before it was tried.
    """
    stock = _only_stock(trainer, path)
    if stock:
        return BatchPlan("stock", stock)
    if trainer.padding_free:
        source = f"packing_strategy={trainer.args.packing_strategy!r}" if trainer.args.packing else "padding_free=True"
        return BatchPlan("packed", source)
    padded = unproven or _rather_padded(trainer, path, flattens)
    return BatchPlan("stock", padded) if padded else BatchPlan("padding_free", "rows without padding, same tokens")


def _only_stock(trainer: SFTTrainer, path: str) -> str:
    """Return why our collator cannot be used at all; empty if it can."""
    args = trainer.args
    parallelism = trainer.accelerator.parallelism_config
    reasons = {
        "packed_attention is off": path == "off",
        "vision data": getattr(trainer, "_is_vision_dataset", False),
        f"custom data collator {type(trainer.data_collator).__name__}": not is_stock_collator(trainer.data_collator),
        "data_collator has padding_free=False, which makes a packed row one document": joins_documents(trainer),
        "context or sequence parallelism": parallelism is not None
        and (parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False)),
        "packing_strategy='wrapped' cuts documents: a row is one document": args.packing
        and args.packing_strategy == "wrapped"
        and not trainer.padding_free,
        "torch_compile=True compiles the whole model, documents of changing length would recompile it": bool(
            args.torch_compile
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


# A subclass may count on one document per row in them.
_SEE_BATCHES = (
    *BATCH_METHODS, "_get_num_items_in_batch", "_track_num_input_tokens", "floating_point_ops", "get_train_dataloader",
    "get_eval_dataloader", "get_test_dataloader", "_get_dataloader", "_get_collator_with_removed_columns",
    "prediction_step", "prediction_loop", "evaluation_loop",
)  # fmt: skip


def _rather_padded(trainer: SFTTrainer, path: str, flattens: bool) -> str:
    """Return why stock's padded batches stay; empty if rows without padding compute the same."""
    args = trainer.args
    config = args.accelerator_config
    own, hook = replaced_methods(trainer, _SEE_BATCHES), hook_inside(trainer.model)
    reasons = {
        f"{path} would pad the documents again": not flattens,
        f"pad_to_multiple_of={trainer.data_collator.pad_to_multiple_of} asks for padded shapes": bool(
            trainer.data_collator.pad_to_multiple_of
        ),
        "compute_loss_func expects one document per row": trainer.compute_loss_func is not None,
        f"{own} may expect one document per row": bool(own),
        f"{hook} may expect one document per row": bool(hook),
        ALORA: is_invoked_once_per_row(trainer.model),
        "NEFTune's noise depends on the length of a row": bool(args.neftune_noise_alpha),
        "include_num_input_tokens_seen counts padding": str(args.include_num_input_tokens_seen).lower()
        not in ("no", "false"),
        "split_batches cuts a batch by rows": bool(config.split_batches) or bool(config.dispatch_batches),
        "this model's loss counts the first label of each padded row": not getattr(
            trainer, "_loss_shifts_labels", False
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def packing_collator(trainer: SFTTrainer) -> PackingCollator:
    """Return our collator with the settings of the trainer's stock collator."""
    stock = trainer.data_collator
    return PackingCollator(
        pad_token_id=stock.pad_token_id,
        pad_to_multiple_of=stock.pad_to_multiple_of,
        vocab_size=vocabulary(trainer.model),
    )


def vocabulary(model: Any) -> int:
    """Return the rows of the token embedding: the token ids that the model can take."""
    embedding = model.get_input_embeddings()
    return int(getattr(embedding, "num_embeddings", 0) or model.config.get_text_config().vocab_size)


def fast_view(trainer: SFTTrainer, dataset: Any) -> Any:
    """Return a map-style data set read from Arrow's memory; others, and formats the user set, as they are."""
    if not isinstance(dataset, Dataset):
        return dataset
    columns = COLUMNS if trainer.padding_free else PADDING_FREE_COLUMNS
    dataset = dataset.remove_columns([name for name in COLUMNS if name in dataset.column_names and name not in columns])
    if dataset.format["type"] is not None:
        return dataset
    plain = getattr(trainer.args, "train_sampling_strategy", "random") in ("random", "sequential")
    samplers = replaced_methods(trainer, ("_get_train_sampler", "_get_eval_sampler"))
    if not (plain and not samplers and is_token_lists(dataset, columns)):
        return dataset.with_format("numpy")  # other samplers read columns of a `datasets.Dataset`
    return ArrowRows(dataset, columns)
