"""The feature `verify_packing`: the proof when training starts, and what its outcome does to the run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import ref

import torch
from accelerate.logging import get_logger

from fastpack_trl.attention.dense import stock_error
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.attention.probe import default_lengths, spans
from fastpack_trl.attention.proof import PackingProof, verify_packing
from fastpack_trl.errors import NonFiniteError, PackingError, UnsteadyError, first_reason
from fastpack_trl.model.changes import during_training
from fastpack_trl.model.facts import (
    UNREADABLE,
    backbones,
    is_prompt_learning,
    read_features,
    state_modules,
    stock_implementation,
    text_model,
)  # fmt: skip
from fastpack_trl.model.sharded import reshard_all
from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.batching import joins_documents
from fastpack_trl.run import ONCE_SHARDED, Choice, Run

logger = get_logger(__name__)

INSIST = "verify_packing='off' trains all the same"

_SHARDED = "parameters are sharded when training starts"
# What a model raises that does not take the arguments of the proof, or runs by a kernel that is not installed.
_CANNOT_RUN = (*UNREADABLE, ImportError)


class _Examined(NamedTuple):
    """The attention and the model of the last proof of a run, whether it could run or not."""

    choice: Choice
    model: ref[Any]


def is_examined(run: Run) -> bool:
    """Return whether a proof was tried of the attention and the model that the run has now."""
    return run.part(_Examined) == _Examined(run.choice, ref(run.model))


def prove(run: Run, attention: PackedAttention, stack: ExitStack) -> str:
    """Prove `attention`, installed on the model of a run that begins; `stack` closes when it ends.

    Returns:
        The reason why the proof cannot run on this model; empty where it ran, runs later, or is not due.

    Raises:
        PackingError: the proof failed; names the remedy.
        ValueError: it cannot run, and ``verify_packing="on"`` insists.
    """
    if not _due(run):
        return ""
    if run.settings.verify_packing == "auto" and _documents_are_alone(run) and not spans(attention, run.model):
        run.say("verify_packing", "off", "not run", "each row is one document")
        return ""
    unproven = ""

    def now() -> None:
        nonlocal unproven
        proof, unproven = _proof(run, attention=attention)
        run.keep(_Examined(run.choice, ref(run.model)))
        if proof is not None:
            run.say("verify_packing", "on", "proof", str(proof.raise_if_failed()))
        if unproven and run.is_fsdp2 and run.plan.kind == "padding_free":  # its loaders are there already
            raise PackingError(
                f"rows without padding are not proven for this model: {unproven}; set packed_attention='off' for "
                f"padded ones; {INSIST}"
            )

    _now_or_once_sharded(run, stack, now)
    return unproven


def _now_or_once_sharded(run: Run, stack: ExitStack, prove: Callable[[], None]) -> None:
    """Call `prove`; under FSDP 2 when training begins, on the whole model and in every process."""
    if not run.is_fsdp2:
        prove()
        return

    def prove_together() -> None:
        try:
            prove()
        finally:
            reshard_all(run.model)

    run.say("verify_packing", "on", "pending", ONCE_SHARDED)
    stack.enter_context(during_training(run.trainer, at_begin=prove_together))


def prove_stock(run: Run, stack: ExitStack) -> None:
    """Prove packed rows under stock's own attention. Where the model cannot be run, its source decides.

    Raises:
        PackingError: documents see each other; names the path, the leak and the remedy.
        ValueError: the proof cannot run, and ``verify_packing="on"`` insists.
    """
    due, remedy = _due(run), _remedy(run)
    if run.settings.verify_packing == "off":
        return
    if joins_documents(run.trainer):
        raise PackingError(f"packed rows under stock: LEAK: every row is one document to the model; {remedy}")
    if not due:
        if leak := stock_leak(run.model):
            raise PackingError(f"packed rows under stock: LEAK: {leak}; {remedy}")
        kept = "by its source stock keeps this model's documents apart"
        run.say("verify_packing", "off", "not run", f"{_SHARDED}; {kept}")
        return
    _now_or_once_sharded(run, stack, lambda: _prove_stock(run, remedy))


def _prove_stock(run: Run, remedy: str) -> None:
    proof, _ = _proof(run, implementation="off")
    if proof is None:
        return
    run.say("verify_packing", "on", "proof of stock", str(proof))
    if proof.proven:
        return
    collator = run.trainer.data_collator
    if isinstance(collator, DataCollatorForLanguageModeling) or run.settings.verify_packing == "on":
        proof.raise_if_failed(remedy)
    # A collator of the user's own may tell the model what stock's does not.
    logger.warning(f"rows as stock packs them: {proof}; what {type(collator).__name__} makes of them is not examined")


def stock_leak(model: Any) -> str:
    """Return why packed documents of `model` see each other under stock, by its source; empty if no reason is known.

    For sharded parameters, which cannot be run. Stock tells documents apart by `position_ids`: by the mask that is made
    of them, or by a kernel that gets them.
    """
    return first_reason(_stock_leaks(model))


def _stock_leaks(model: Any) -> Iterator[object]:
    base = text_model(model)
    config, states = base.config.get_text_config(), state_modules(base)
    family, implementation = config.model_type, stock_implementation(config)
    yield is_prompt_learning(model) and "prompt learning drops position_ids, by which stock tells documents apart"
    if states and not _separates_states(_source(inspect.getmodule(type(base)))):
        yield f"{family} carries state from one document into the next ({type(states[-1]).__name__})"
    if "flash" in implementation:
        return  # no mask: the kernel gets the positions
    knows = all(_mask_knows_positions(_source(type(module).forward)) for module in backbones(model))
    yield not knows and f"{family} makes its {implementation} mask without position_ids"


def _separates_states(source: str) -> bool:
    """Return whether the file of a model with state tells its kernels where a document begins; True if unreadable."""
    return not source or bool(re.search(r"seq_idx|cu_seq|\b\w+_fn\(.*\*\*kwargs\)$", source, re.MULTILINE))


def _mask_knows_positions(source: str) -> bool:
    """Return whether a forward gives `position_ids` to each causal mask that it makes; True if unreadable."""
    # The arguments of several masks are usually collected in one dict: {"config": ..., "position_ids": ...}.
    dicts = re.findall(r"\{[^{}]*\}", source)
    collected = any('"attention_mask"' in names and '"position_ids"' in names for names in dicts)
    calls = re.findall(r"create_\w*causal_mask\(((?:[^()]|\([^()]*\))*)\)", source)
    return all("position_ids=" in call or (collected and "**" in call) for call in calls)


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


def stock_is_right(model: Any) -> bool:
    """Return whether this model keeps packed documents apart on its own, slowly or by chance of its family."""
    try:
        return verify_packing(model, implementation="off").proven
    except _CANNOT_RUN:
        return False


def tell_stock_error(run: Run) -> None:
    """Report that TRL's own rows would give another loss: its attention errs, or lets packed documents leak."""
    why = stock_error(read_features(run.model, run.compute_dtype))
    if not why and run.plan.kind == "packed" and not run.is_sharded and run.settings.verify_packing != "off":
        try:
            with run.step.taking("proof"), run.autocast():
                proof = verify_packing(run.model, implementation="off", lengths=default_lengths(run.model))
            why = str(proof) if proof.leaks else ""
        except (*_CANNOT_RUN, torch.OutOfMemoryError):
            return
    if why:
        run.report.facts["stock loss"] = f"differs from the loss of this run, which is right: {why}"


def _remedy(run: Run) -> str:
    """Return how to undo what chose stock's rows, for the message that they leak."""
    if run.choice.path != "off":
        return f"rows are stock's here ({run.plan.reason}): leave that out, or set packing=False; {INSIST}"
    if run.settings.packed_attention == "auto":
        return f"{run.choice.reason}: leave it out, or set packed_attention='padded_rows'; {INSIST}"
    return f"set packed_attention='auto'; {INSIST}"


def _due(run: Run) -> bool:
    if run.settings.verify_packing == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = _SHARDED
    else:
        return True
    run.say("verify_packing", "off", "not run", why)
    return False


def _documents_are_alone(run: Run) -> bool:
    """Return whether no row of a run has two documents: neither collated nor merged, nor in an evaluation."""
    args = run.args
    if run.sequences > 1:
        return False
    if not run.training:
        return run.plan.kind == "padding_free" and args.eval_batch_size == 1
    merges = args.gradient_accumulation_steps > 1 and run.settings.merge_accumulation != "off"
    evaluates = run.trainer.eval_dataset is not None and args.eval_batch_size > 1
    return run.plan.kind == "padding_free" and args.train_batch_size == 1 and not (merges or evaluates)


def _proof(run: Run, **options: Any) -> tuple[PackingProof | None, str]:
    """Return the proof, or None where it cannot be made and was not insisted on: said, and the reason in the model."""
    insists = run.settings.verify_packing == "on" and run.training
    try:
        with run.step.taking("proof"), run.failing_together_if_sharded(), run.autocast():
            proof = verify_packing(run.model, **options)
    except PackingError:
        raise
    except NonFiniteError as error:
        reason = str(error)
        if insists:
            raise ValueError(f"verify_packing='on': {reason}; load weights that are finite") from error
        logger.warning(f"verify_packing: not run: {reason}; training goes on with them, as stock does")
        run.say("verify_packing", "off", "not run", reason)
        return None, ""
    except torch.OutOfMemoryError:
        if insists or "attention" in options:
            raise  # callers that try smaller batches look for its type
        reason = "no memory for the proof"
    except _CANNOT_RUN as error:
        # A model that takes no `inputs_embeds`, say, trains all the same; `verify_packing="on"` insists.
        reason = f"the proof cannot run on this model: {type(error).__name__}: {error}"
        if isinstance(error, UnsteadyError):
            reason = f"nothing can be proven of this model: {error}"
        if insists:
            raise ValueError(f"verify_packing='on': {reason}; set verify_packing='auto' or 'off'") from error
    else:
        run.keep(proof)
        return proof, ""
    run.say("verify_packing", "off", "not run", reason)
    return None, reason
