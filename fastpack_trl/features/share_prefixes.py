"""The option `share_prefixes`: a common prefix of the documents of a row is computed once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from datasets import Dataset
from trl import SFTTrainer

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.interface import shared_refusal
from fastpack_trl.attention.proof import verify_shared
from fastpack_trl.errors import first_reason
from fastpack_trl.model import facts
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.hooks import BATCH_METHODS
from fastpack_trl.packing.batching import counts_tokens, fast_view, has_images, packing_collator, reads_rows
from fastpack_trl.run import Run

FEATURE = "share_prefixes"
FACT = "shared prefixes"
MOST_COMPUTED = 0.95  # of the documents' tokens; above it ``auto`` does not share, which costs time too
_SAMPLE = 64  # micro-batches


def concerns(run: Run) -> bool:
    """Return whether rows may be shared: those of documents in training, those of completions always."""
    run.report.facts.pop(FACT, None)  # of an earlier run
    return run.training or run.kind != "sft"


def why_not(run: Run) -> Iterator[object]:
    """Yield why documents stay whole, with the saving that this leaves out, or why prompts are repeated."""
    yield not run.packs and run.plan.reason
    yield has_images(run.trainer) and "prefixes with images are not compared"
    yield from _in_rows_of_documents(run) if run.kind == "sft" else _for_completions(run)


def _for_completions(run: Run) -> Iterator[object]:
    backend = BACKENDS.get(run.attention_path)
    yield (backend is None or not backend.shares) and f"{run.attention_path} does not support shared prompts"
    for model in filter(None, (run.model, getattr(run.trainer, "ref_model", None))):  # both see the same rows
        yield facts.state_modules(model) and "layers with a recurrent state cannot branch after a prompt"
    drop = facts.dropout_of(run.model)
    yield drop and f"{drop} would drop the same tokens of a prompt for all of its completions; set it to 0"


def _in_rows_of_documents(run: Run) -> Iterator[object]:
    computed = run.shared_rows_compute = computed_share(run.trainer)
    little = f"{computed:.0%} of the tokens would still be computed" if (computed or 0) > MOST_COMPUTED else ""
    if why := first_reason(_reasons(run, little)):
        saves = "" if little else _saving(computed, "; without that ")
        if saves:  # the banner omits the reasons of disabled features
            run.report.facts[FACT] = f"off: {why}{saves}"
        yield f"{why}{saves}"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Store shared prefixes once in training rows; after `sync_free`, whose loss counts them once per document."""
    if run.kind != "sft":
        run.set_status(FEATURE, "on", "prompts once")
    else:
        saving = _saving(run.shared_rows_compute) or "the saving is unknown for a streamed data set"
        run.set_status(FEATURE, "on", "prefixes once", saving)
    with patch_attribute(run, "shares_prefixes", True):
        yield


def _saving(computed: float | None, before: str = "") -> str:
    return f"{before}{1 - computed:.0%} fewer tokens to compute" if computed else ""


def _reasons(run: Run, little: str) -> Iterator[object]:
    trainer, model, setting = run.trainer, run.model, run.settings.share_prefixes
    yield from reads_rows(trainer, *BATCH_METHODS, "_get_num_items_in_batch", "_track_num_input_tokens")
    yield from counts_tokens(trainer)
    yield not run.loss_is_ours and "the loss of shared positions needs sync_free"
    streamed = setting == "auto" and not isinstance(trainer.train_dataset, Dataset)
    yield streamed and "the saving is unknown for a streamed data set: set share_prefixes='on' to share anyway"
    yield little and setting != "on" and f"little to share: {little}"
    attention: PackedAttention = run.attention
    backend = BACKENDS.get(run.choice.path)
    assert backend is not None
    yield shared_refusal(backend, attention.features)
    yield run.is_sharded and "parameters are sharded: the check of shared prefixes needs them whole"
    states = facts.state_modules(model)
    yield states and f"{type(states[-1]).__name__} carries state along the row"
    noise = facts.dropout_of(model)
    yield noise and f"{noise} would be the same on a prefix for all documents: set it to 0 to share prefixes"
    if run.settings.verify_packing != "off":  # last: it runs the model
        yield _failed_check(run, attention)


def _failed_check(run: Run, attention: PackedAttention) -> str:
    try:
        with run.autocast():
            proof = verify_shared(run.model, attention)
    except (*facts.UNREADABLE, ImportError) as error:
        return f"the check of shared prefixes cannot run on this model: {type(error).__name__}: {error}"
    return "" if proof.proven else f"{attention.path} failed its check of shared prefixes: {proof}"


def computed_share(trainer: SFTTrainer) -> float | None:
    """Return the share of the documents' tokens that rows compute if they share prefixes, by a sample; None: a stream.

    Micro-batches are drawn at random, as the trainer draws them.
    """
    dataset = trainer.train_dataset
    if not isinstance(dataset, Dataset) or not len(dataset):
        return None
    rows, collator = fast_view(dataset), packing_collator(trainer, share_prefixes=True)
    each = trainer.args.per_device_train_batch_size
    drawn = random.Random(trainer.args.seed).sample(range(len(rows)), min(len(rows), _SAMPLE * each))
    computed = whole = 0
    for start in range(0, len(drawn), each):
        batch = collator([rows[index] for index in drawn[start : start + each]])["packed_batch"]
        tokens = sum(batch.seq_lengths)
        computed += tokens
        whole += tokens if batch.documents is None else sum(batch.documents.lengths)
    return computed / whole
