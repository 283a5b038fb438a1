"""The packing proof when training starts: whether it runs, and what its outcome does to the run."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.proof import PackingProof, verify_packing
from fastpack_trl.attention.stock_leak import stock_leak
from fastpack_trl.config import setting_of
from fastpack_trl.errors import NonFiniteError, PackingError
from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.batching import joins_documents

logger = get_logger(__name__)

INSIST = "verify_packing='off' trains all the same"

_SHARDED = "parameters are sharded when training starts"
# What a model raises that does not take the arguments of the proof.
_CANNOT_RUN = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)


def prove(trainer: Any, attention: PackedAttention) -> None:
    """Prove the attention that is installed on the model of `trainer`.

    Raises:
        PackingError: the proof failed; names the remedy.
        ValueError: it cannot run, and ``verify_packing="on"`` insists.
    """
    if not _due(trainer):
        return
    proof = _run(trainer, attention=attention)
    if proof is not None:
        trainer.fastpack_report.add("verify_packing", "on", "proof", str(proof.raise_if_failed()))


def prove_stock(trainer: Any) -> None:
    """Prove packed rows under stock's own attention. Where the model cannot be run, its source decides.

    Raises:
        PackingError: documents see each other; names the path, the leak and the remedy.
        ValueError: the proof cannot run, and ``verify_packing="on"`` insists.
    """
    remedy, due = _remedy(trainer), _due(trainer)
    if setting_of(trainer.args, "verify_packing") == "off":
        return
    if joins_documents(trainer):
        raise PackingError(f"packed rows under stock: LEAK: every row is one document to the model; {remedy}")
    if not due:
        leak = stock_leak(trainer.model)
        if leak:
            raise PackingError(f"packed rows under stock: LEAK: {leak}; {remedy}")
        why = f"{_SHARDED}; by its source stock keeps this model's documents apart"
        trainer.fastpack_report.add("verify_packing", "off", "not run", why)
        return
    proof = _run(trainer, implementation="off")
    if proof is None:
        return
    trainer.fastpack_report.add("verify_packing", "on", "proof of stock", str(proof))
    if proof.proven:
        return
    collator = trainer.data_collator
    if isinstance(collator, DataCollatorForLanguageModeling) or setting_of(trainer.args, "verify_packing") == "on":
        proof.raise_if_failed(remedy)
    # A collator of the user's own may tell the model what stock's does not.
    logger.warning(f"rows as stock packs them: {proof}; what {type(collator).__name__} makes of them is not examined")


def stock_is_right(model: Any) -> bool:
    """Whether this model keeps packed documents apart on its own, slowly or by chance of its family."""
    try:
        return verify_packing(model, implementation="off").proven
    except _CANNOT_RUN:
        return False


def _remedy(trainer: Any) -> str:
    """What to do where stock's rows leak: undo what chose them."""
    choice, plan = trainer._fastpack_choice, trainer._fastpack_plan
    if choice.path != "off":
        return f"rows are stock's here ({plan.reason}): leave that out, or set packing=False; {INSIST}"
    if setting_of(trainer.args, "packed_attention") == "auto":
        return f"{choice.reason}: leave it out, or set packed_attention='padded_rows'; {INSIST}"
    return f"set packed_attention='auto'; {INSIST}"


def _due(trainer: Any) -> bool:
    setting = setting_of(trainer.args, "verify_packing")
    if setting == "off" or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why = "switched off" if setting == "off" else _SHARDED
        trainer.fastpack_report.add("verify_packing", "off", "not run", why)
        return False
    return True


def _run(trainer: Any, **options: Any) -> PackingProof | None:
    """The proof, or None where it cannot be made: said, and an error where it was insisted on."""
    insists = setting_of(trainer.args, "verify_packing") == "on"
    try:
        with trainer.accelerator.autocast():
            proof = verify_packing(trainer.model, **options)
    except PackingError:
        raise
    except NonFiniteError as error:
        reason = str(error)
        if insists:
            raise ValueError(f"verify_packing='on': {reason}; load weights that are finite") from error
        logger.warning(f"verify_packing: not run: {reason}; training goes on with them, as stock does")
    except torch.OutOfMemoryError:
        if insists or "attention" in options:
            raise  # callers that try smaller batches look for its type
        reason = "no memory for the proof"
    except _CANNOT_RUN as error:
        # A model that takes no `inputs_embeds`, say, trains all the same; `verify_packing="on"` insists.
        reason = f"the proof cannot run on this model: {type(error).__name__}: {error}"
        if insists:
            raise ValueError(f"verify_packing='on': {reason}; set verify_packing='auto' or 'off'") from error
    else:
        trainer.fastpack_proof = proof
        return proof
    trainer.fastpack_report.add("verify_packing", "off", "not run", reason)
    return None
