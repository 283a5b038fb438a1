"""Choice of a run's batches: packed rows, padding-free rows, or TRL's, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from datasets import Dataset
from trl import SFTTrainer

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import ALORA, is_invoked_once_per_row, is_prompt_learning, token_table
from fastpack_trl.model.hooks import BATCH_METHODS, hook_inside, replaced_methods
from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.documents import PADDED_DOCUMENTS


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How batches are made.

    ``packed``: TRL packs or flattens, we add metadata; ``padding_free``: TRL pads, we flatten; ``documents``: TRL
    packs, each document becomes a padded row; ``stock``: TRL's batches.
    """

    kind: Literal["packed", "padding_free", "documents", "stock"]
    reason: str


def has_images(trainer: Any) -> bool:
    """Return whether TRL trains on images: its collator runs the processor."""
    return bool(getattr(trainer, "_is_vision_dataset", False))


def is_stock_collator(collator: object) -> bool:
    """Return whether a collator is exactly TRL's own for text; a subclass may do something that ours does not."""
    return type(collator) is DataCollatorForLanguageModeling


def joins_documents(trainer: SFTTrainer) -> bool:
    """Return whether TRL's collator was set up without ``padding_free``: each packed row would be one document."""
    collator = trainer.data_collator
    return bool(is_stock_collator(collator) and trainer.padding_free and not collator.padding_free)


def plan_batches(trainer: SFTTrainer, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
    """Return the batches of a run whose attention takes `path`, which rows without padding suit if it `flattens`.

    `unproven`: why no check has shown that the model separates documents in such rows; empty before the check.
    """
    if stock := first_reason(chain(_only_stock(trainer, path), [trainer.padding_free and unproven])):
        return BatchPlan("stock", stock)
    if not trainer.padding_free:
        reasons = chain([unproven], _padded_in_sft(trainer), _padded(trainer, path, flattens))
        return _without_padding(first_reason(reasons))
    if path == PADDED_DOCUMENTS:
        return BatchPlan("documents", "each document of a packed row is padded as a row of its own")
    source = f"packing_strategy={trainer.args.packing_strategy!r}" if trainer.args.packing else "padding_free=True"
    return BatchPlan("packed", source)


def plan_padded(trainer: SFTTrainer, path: str, flattens: bool, reasons: Iterable[object]) -> BatchPlan:
    """Return the batches of an SFT run on images, which TRL pads, unless one of `reasons` keeps them padded."""
    every = chain(reasons, _in_any_trainer(trainer, path, images=True), _padded_in_sft(trainer))
    return _without_padding(first_reason(chain(every, _padded(trainer, path, flattens))))


def plan_prompt_groups(trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
    """Return the batches of a trainer that scores completions: as rows without padding, or as TRL pads them."""
    reasons = chain(_in_any_trainer(trainer, path), _padded_prompts(trainer), _padded(trainer, path, flattens, *_SCORE))
    return _without_padding(unproven or first_reason(reasons))


def _without_padding(why_padded: str) -> BatchPlan:
    if why_padded:
        return BatchPlan("stock", why_padded)
    return BatchPlan("padding_free", "rows without padding, same tokens")


# A subclass may count on one document per row in them.
_SEE_BATCHES = (
    *BATCH_METHODS, "_get_num_items_in_batch", "_track_num_input_tokens", "floating_point_ops", "get_train_dataloader",
    "get_eval_dataloader", "get_test_dataloader", "_get_dataloader", "_get_collator_with_removed_columns",
    "prediction_step", "prediction_loop", "evaluation_loop",
)  # fmt: skip
_SCORE = ("_compute_loss", "compute_ref_log_probs", "_compute_kl_logps", "_get_per_token_logps_and_entropies")


def _in_any_trainer(trainer: Any, path: str, *, images: bool = False) -> Iterator[object]:
    """Yield reasons to keep TRL's batches that apply to every trainer."""
    parallelism = trainer.accelerator.parallelism_config
    yield path == "off" and "packed_attention is off"
    yield not images and has_images(trainer) and "vision data"
    split = parallelism is not None and (parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False))
    yield split and "context or sequence parallelism"
    recompiles = "torch_compile=True compiles the whole model, documents of changing length would recompile it"
    yield trainer.args.torch_compile and recompiles


def _only_stock(trainer: SFTTrainer, path: str) -> Iterator[object]:
    """Yield why our collator cannot be used at all."""
    args, collator = trainer.args, trainer.data_collator
    yield from _in_any_trainer(trainer, path)
    yield not is_stock_collator(collator) and f"custom data collator {type(collator).__name__}"
    yield joins_documents(trainer) and "data_collator has padding_free=False, which makes a packed row one document"
    wrapped = args.packing and args.packing_strategy == "wrapped" and not trainer.padding_free
    yield wrapped and "packing_strategy='wrapped' cuts documents: a row is one document"


def _padded(trainer: Any, path: str, flattens: bool, *methods: str) -> Iterator[object]:
    """Yield why TRL's padded batches stay, although rows without padding would compute the same."""
    yield path == PADDED_DOCUMENTS and "no packed attention keeps this model's documents apart"
    yield not flattens and f"{path} gains nothing from one long row"
    yield from reads_rows(trainer, *_SEE_BATCHES, *methods)


def reads_rows(trainer: Any, *methods: str) -> Iterator[object]:
    """Yield reasons to keep TRL's rows: replaced `methods`, hooks or settings read them, or draw numbers for them."""
    args, config = trainer.args, trainer.args.accelerator_config
    has_loss = callable(trainer.compute_loss_func)  # some trainers of TRL put a string there
    yield has_loss and "compute_loss_func may expect the rows that TRL makes"
    yield (own := replaced_methods(trainer, methods)) and f"{own} may expect the rows that TRL makes"
    yield (hook := hook_inside(trainer.model)) and f"{hook} may expect the rows that TRL makes"
    yield is_invoked_once_per_row(trainer.model) and ALORA
    yield args.neftune_noise_alpha and "NEFTune's noise depends on the length of a row"
    yield (config.split_batches or config.dispatch_batches) and "split_batches cuts a batch by rows"


def counts_tokens(trainer: Any) -> Iterator[object]:
    """Yield why the number of tokens in the rows of an SFT trainer must stay."""
    counts = str(trainer.args.include_num_input_tokens_seen).lower() not in ("no", "false")
    yield counts and "include_num_input_tokens_seen counts the tokens of rows"


def _padded_in_sft(trainer: SFTTrainer) -> Iterator[object]:
    yield from counts_tokens(trainer)
    collator = trainer.data_collator
    numbers = getattr(collator, "return_position_ids", False)
    yield numbers and "data_collator numbers the positions of the documents in a padded row"
    multiple = collator.pad_to_multiple_of
    yield multiple and f"pad_to_multiple_of={multiple} asks for padded shapes"
    shifts = getattr(trainer, "_loss_shifts_labels", False)
    yield not shifts and "this model's loss counts the first label of each padded row"


def _padded_prompts(trainer: Any) -> Iterator[object]:
    yield is_prompt_learning(trainer.model) and "prompt learning puts virtual tokens before each row"
    yield trainer.is_deepspeed_enabled and "DeepSpeed runs an engine of its own"
    flat = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    yield flat and "FSDP version 1 flattens the head: set fsdp_version=2"


def packing_collator(trainer: SFTTrainer, *, share_prefixes: bool = False) -> PackingCollator:
    """Return our collator with the settings of the trainer's own."""
    stock = trainer.data_collator
    return PackingCollator(
        pad_token_id=stock.pad_token_id, pad_to_multiple_of=stock.pad_to_multiple_of,
        vocab_size=vocabulary(trainer.model), share_prefixes=share_prefixes, whole_rows=not trainer.padding_free,
    )  # fmt: skip


def vocabulary(model: Any) -> int:
    """Return the rows of the token embedding: the token ids that the model can take."""
    return int(getattr(token_table(model), "num_embeddings", 0) or model.config.get_text_config().vocab_size)


def fast_view(dataset: Any) -> Any:
    """Return a map-style data set whose rows are NumPy arrays; others, and formats the user set, as they are."""
    is_plain = isinstance(dataset, Dataset) and dataset.format["type"] is None
    return dataset.with_format("numpy") if is_plain else dataset
