"""The feature `share_prefixes`: what the documents of a row begin with alike is computed once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from datasets import Dataset
from trl import SFTTrainer

from fastpack_trl.attention.shared_proof import why_not_shared
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.hooks import BATCH_METHODS, hook_inside, replaced_methods
from fastpack_trl.packing.batching import fast_view, packing_collator
from fastpack_trl.run import Run

FEATURE = "share_prefixes"
FACT = "shared prefixes"
MOST_COMPUTED = 0.95
"""Of the documents' tokens, above which ``auto`` leaves rows as they are: finding prefixes and gathering keys costs."""
_SAMPLE = 64
"""Micro-batches that are looked at."""


@contextmanager
def share_prefixes(run: Run) -> Iterator[None]:
    """Let the rows of a training hold shared prefixes once; after `sync_free`, whose loss counts them as often."""
    looks = run.settings.share_prefixes != "off" and run.packs
    computed = computed_share(run.trainer) if looks else None
    share = f"tokens computed: {computed:.0%} of the documents' tokens" if computed else ""
    little = computed is not None and computed > MOST_COMPUTED
    run.report.facts.pop(FACT, None)

    def why() -> str:
        # The proof is the last of the reasons: it is not run for what would save nothing.
        asked = run.settings.share_prefixes == "on"
        return (
            first_reason(_reasons(run))
            or (f"little to share, {share}" if little and not asked else "")
            or why_not_shared(run)
        )

    # As one: an evaluation between has all of them wait for each other.
    if found := run.ranks.first_reason(why):
        saves = f"; without that {share}" if share and not little and found != "switched off" else ""
        run.say(FEATURE, "off", "each document whole", f"{found}{saves}")
        if saves:  # the banner shows no reason of what is off
            run.report.facts[FACT] = f"off: {found}{saves}"
        yield
        return
    run.say(FEATURE, "on", "prefixes once", share or "how many tokens that spares is not known of a stream")
    with patch_attribute(run, "shares_prefixes", True):
        yield


def _reasons(run: Run) -> Iterator[object]:
    trainer, args = run.trainer, run.args
    config = args.accelerator_config
    yield run.settings.share_prefixes == "off" and "switched off"
    yield not run.packs and run.plan.reason
    yield trainer.compute_loss_func is not None and "compute_loss_func expects whole documents"
    yield not run.loss_is_ours and "the loss of shared positions needs sync_free"
    methods = (*BATCH_METHODS, "_get_num_items_in_batch", "_track_num_input_tokens")
    yield (own := replaced_methods(trainer, methods)) and f"{own} may expect whole documents"
    yield (hook := hook_inside(trainer.model)) and f"{hook} may expect whole documents"
    yield args.neftune_noise_alpha and "NEFTune would add the same noise to a prefix for all documents"
    counts = str(args.include_num_input_tokens_seen).lower() not in ("no", "false")
    yield counts and "include_num_input_tokens_seen counts the tokens of rows"
    yield (config.split_batches or config.dispatch_batches) and "split_batches cuts a batch by rows"
    streamed = run.settings.share_prefixes == "auto" and not isinstance(trainer.train_dataset, Dataset)
    yield streamed and "a stream has no sample that would say what it saves: share_prefixes='on' shares"


def computed_share(trainer: SFTTrainer) -> float | None:
    """Return the tokens that are left of the documents' in rows that share, of a sample; None of a stream.

    Micro-batches are drawn at random, as the trainer draws them.
    """
    dataset = trainer.train_dataset
    if not isinstance(dataset, Dataset) or not len(dataset):
        return None
    rows, collator = fast_view(trainer, dataset), packing_collator(trainer, share_prefixes=True)
    each = trainer.args.per_device_train_batch_size
    drawn = random.Random(trainer.args.seed).sample(range(len(rows)), min(len(rows), _SAMPLE * each))
    computed = whole = 0
    for start in range(0, len(drawn), each):
        batch = collator([rows[index] for index in drawn[start : start + each]])["packed_batch"]
        tokens = sum(batch.seq_lengths)
        computed += tokens
        whole += tokens if batch.documents is None else sum(batch.documents.lengths)
    return computed / whole
