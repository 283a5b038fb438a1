"""The option `verify_packing`: the packing check when training starts, and the effect of its outcome on the run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import stock_error
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.proof import PackingProof, leak_of_stock, verify_packing
from fastpack_trl.attention.small_copy import small_copy
from fastpack_trl.errors import NonFiniteError, PackingError
from fastpack_trl.model.facts import UNREADABLE, read_features
from fastpack_trl.model.kinds import Kinds, one_of_each_kind
from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.batching import joins_documents
from fastpack_trl.run import Choice, Run

logger = get_logger(__name__)

INSIST = "verify_packing='off' trains anyway"
# What a model raises that does not take the arguments of the check, or runs by a kernel that is not installed.
_CANNOT_RUN = (*UNREADABLE, ImportError)


class _Examined(NamedTuple):  # by the last check of a run, whether it could run or not
    choice: Choice
    model: ref[Any]


def is_examined(run: Run) -> bool:
    """Return whether the attention and the model that the run has now were checked."""
    return bool(run.examined == _Examined(run.choice, ref(run.model)))


def prove(run: Run, attention: PackedAttention | None) -> str:
    """Check rows before the first of them, under an installed `attention`, or under TRL's own if it is None.

    Return why the check cannot run on this model; empty if it ran or is not due.

    Raises:
        PackingError: documents see each other; names the path, the leak and the remedy.
        ValueError: the check cannot run, and ``verify_packing="on"`` requires it.
    """
    if run.settings.verify_packing == "off":
        run.set_status("verify_packing", "off", "not run", "switched off")
        return ""
    if attention is None and joins_documents(run.trainer):
        raise PackingError(f"TRL's packed rows leak: the model treats each row as one document; {_remedy(run)}")
    proof, unproven = None, ""
    try:
        with run.autocast():
            proof = _checked(run, attention)
    except PackingError:
        raise
    except (torch.OutOfMemoryError, *_CANNOT_RUN) as error:
        unproven = _why_not_run(run, attention, error)
    if attention is not None:  # the check of TRL's rows says nothing about ours
        run.examined = _Examined(run.choice, ref(run.model))
    if proof is None:
        return unproven
    run.proof = proof
    verdict, _, reason = str(proof).partition(": ")
    run.set_status("verify_packing", "on", verdict if attention else f"{verdict}, TRL's rows", reason)
    # A collator of the user's own may pass metadata that TRL's does not.
    collator = run.trainer.data_collator
    is_known = isinstance(collator, DataCollatorForLanguageModeling) or run.settings.verify_packing == "on"
    if attention is not None or is_known:
        ours = "" if run.trainer.padding_free else "packed_attention='auto' keeps TRL's padded batches"
        proof.raise_if_failed(ours if attention else _remedy(run))
    elif not proof.proven:
        logger.warning(f"rows as TRL packs them: {proof}; rows of {type(collator).__name__} were not checked")
    return ""


def _why_not_run(run: Run, attention: PackedAttention | None, error: Exception) -> str:
    """Report why the check did not run; return the reason if the model causes it."""
    is_strict, unproven = run.settings.verify_packing == "on" and run.training, ""
    reason, fix = str(error), "set verify_packing='auto' or 'off'"
    if isinstance(error, NonFiniteError):
        fix = "load finite weights, or set verify_packing='off'"
        logger.warning(f"verify_packing: not run: {reason}; training continues with the non-finite weights, as in TRL")
    elif isinstance(error, torch.OutOfMemoryError):
        if is_strict or attention is not None:
            raise error  # callers that try smaller batches look for its type
        reason = "no memory for the packing check"
    else:
        reason = unproven = f"the packing check cannot run on this model: {type(error).__name__}: {error}"
    if is_strict:
        raise ValueError(f"verify_packing='on': {reason}; {fix}") from error
    run.set_status("verify_packing", "off", "not run", reason)
    return unproven


def _remedy(run: Run) -> str:
    """Return the setting to change if TRL's own rows leak, for the error."""
    if run.settings.packed_attention == "off":
        return f"set packed_attention='auto'; {INSIST}"
    cause = run.choice.reason if run.choice.path == "off" else run.plan.reason
    return f"{cause}: leave that out, or set packing=False; {INSIST}"


def tell_stock_error(run: Run) -> None:
    """Report that TRL's own rows would give another loss: its attention errs, or lets packed documents leak."""
    stock = PackedAttention(Choice("off", ""), read_features(run.model, run.compute_dtype, run.device))
    why = stock_error(stock.features)
    if not why and run.plan.kind == "packed" and not run.is_sharded and run.settings.verify_packing != "off":
        try:
            with run.autocast(), one_of_each_kind(run.kinds or Kinds(run.model)):
                why = leak_of_stock(run.model, stock)
        except (*_CANNOT_RUN, torch.OutOfMemoryError):
            return
    if why:
        run.report.facts["stock loss"] = f"differs from the loss of this run, which is right: {why}"


def verify_kinds(model: Any, kinds: Kinds, **options: Any) -> PackingProof:
    """Check one decoder layer of each kind; all if it cannot run, or fails without a leak: the report is of all."""
    with suppress(*_CANNOT_RUN), one_of_each_kind(kinds) as skipped:
        if skipped and ((proof := verify_packing(model, **options)).proven or proof.leaks):
            return proof
    return verify_packing(model, **options)


def _checked(run: Run, attention: PackedAttention | None) -> PackingProof:
    """Check the model; a small copy if its parameters are, or will be, in several processes or on another device."""
    if not run.is_sharded and next(run.model.parameters()).device.type == run.device.type:
        with suppress(ImportError):  # TRL's own forward lacks a kernel (weights in FP8, say), which ours does without
            return verify_kinds(run.model, run.kinds or Kinds(run.model), implementation="off", attention=attention)
    path = attention.path if attention is not None and attention.path in BACKENDS else "off"
    with small_copy(run.model, run.device, run.compute_dtype) as copy:
        return verify_packing(copy, implementation=path, attention=attention if path == "off" else None)
