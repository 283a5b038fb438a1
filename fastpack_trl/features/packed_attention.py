"""The option `packed_attention`: how its documents are separated, which rows it gets, and how that is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.attention.install import PackedAttention, packed_attention
from fastpack_trl.errors import PackingError
from fastpack_trl.features.verify_packing import is_examined, prove, tell_stock_error
from fastpack_trl.features.vision_rows import switched_off
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import asked_for, read_features
from fastpack_trl.model.kinds import Kinds
from fastpack_trl.packing.batching import BatchPlan, has_images, vocabulary
from fastpack_trl.packing.dataset import check_vocabulary, is_token_lists, padding_cost
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.report import Status
from fastpack_trl.run import Choice, Run

logger = get_logger(__name__)


def choose_attention(run: Run) -> None:
    """Choose the attention path of a run, and its batches.

    Raises:
        ValueError: the requested path would be wrong for the model; names the fix.
    """
    keywords = run.args.model_init_kwargs or {}
    features = read_features(run.model, run.compute_dtype, run.device)
    choice = choose(
        run.settings.packed_attention,
        features,
        stock_requested=asked_for(run.model, keywords.get("attn_implementation")),
        attempt=failure,
    )
    run.choice = replace(choice, setting=run.settings.packed_attention)
    plan_rows(run)


def plan_rows(run: Run, plan: BatchPlan | None = None) -> None:
    """Plan the batches of a run for its attention path, or take the `plan` that all processes have agreed on."""
    run.plan = plan or _plan(run)
    _tell(run)
    run.set_status("batches", "on" if run.packs else "stock", run.plan.kind.replace("_", "-"), run.plan.reason)
    if run.kind == "sft":
        why = "not counted for images" if has_images(run.trainer) else "unknown (streamed or prepared elsewhere)"
        unknown = {"truncated tokens": why}
        run.report.facts |= unknown if run.facts is None else run.facts.figures
    dataset = run.trainer.train_dataset
    if run.plan.kind == "documents" and isinstance(dataset, Dataset):
        run.report.facts["padded tokens per token"] = f"at least {padding_cost(dataset):.2f}"


def _tell(run: Run) -> None:
    """Report how documents are separated; rows that TRL pads hold one each."""
    choice = run.choice
    if run.packs:
        run.set_status("packed_attention", "on", choice.path, choice.reason)
    elif choice.path in ("off", PADDED_DOCUMENTS):
        status: Status = "off" if run.settings.packed_attention == "off" else "stock"
        run.set_status("packed_attention", status, "stock", choice.reason)
    else:
        run.set_status("packed_attention", "off", "stock", run.plan.reason, holds=not run.trainer.padding_free)


def _plan(run: Run) -> BatchPlan:
    unproven = "" if run.settings.verify_packing == "off" else run.choice.unproven
    unproven = switched_off(run) or unproven
    return run.plan_batches(run.trainer, run.choice.path, run.choice.flattens, unproven)


def plan_rows_again(run: Run) -> None:
    """Choose and plan again if a setting, hook, method or collator has changed; the log says so.

    If one process uses TRL's batches, all do: TRL's loss gathers its figures in each micro-batch, ours between two
    logs.

    Raises:
        ValueError: as `choose_attention`.
    """
    own = run.plan

    def why_stock() -> str:
        nonlocal own
        if run.choice.setting != run.settings.packed_attention:
            choose_attention(run)
            logger.warning(f"packed_attention: {run.choice.path} ({run.choice.reason})")
        own = _plan(run)
        return own.reason if own.kind == "stock" else ""

    stock = run.ranks.first_reason(why_stock)
    plan = BatchPlan("stock", stock) if stock else own
    if plan != run.plan:
        plan_rows(run, plan)
        logger.warning(f"batches: {run.plan.kind.replace('_', '-')} ({run.plan.reason})")


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Install the attention of the run; check before its first rows that packed documents do not see each other."""
    plan_rows_again(run)
    if not run.packs and run.is_strict:
        _tell(run)  # reported before `train` too, which stops if an explicit setting is not met
    with ExitStack() as stack:
        if run.packs:
            _install(run, stack)
        elif run.training and not run.trainer.padding_free:
            run.set_status("verify_packing", "off", "not run", "a row is one document", holds=True)
        elif run.plan.kind != "documents":
            _check_stock(run)
        if run.plan.kind == "documents" and (run.training or not is_examined(run)):
            padded = PackedAttention(run.choice, read_features(run.model, run.compute_dtype, run.device))
            if failed := run.ranks.first_reason(lambda: _failure(run, padded)):
                _replan(run, replace(run.choice, unproven=f"{run.choice.reason}; {failed}"))
                _check_stock(run)
        yield


def _check_stock(run: Run) -> None:
    """Check rows that TRL packs. If no other rows passed, the report has said so, and TRL's run as without us."""
    if run.training and run.trainer.padding_free and (not run.choice.unproven or run.settings.verify_packing == "on"):
        prove(run, None)


def _failure(run: Run, attention: PackedAttention) -> str:
    """Check the rows of a run before the first of them; return why others are needed, or ``""``."""
    try:
        unproven = prove(run, attention)
    except PackingError as error:
        if run.settings.packed_attention != "auto" and (run.training or run.plan.kind == "packed"):
            raise
        run.set_status("verify_packing", "on", "failed", str(error))
        return f"{attention.path} failed its packing check: {error}"
    return f"rows without padding are not checked: {unproven}" if unproven and run.packs else ""


def _replan(run: Run, choice: Choice) -> None:
    run.choice = choice
    plan_rows(run)
    for fact in ("stock loss", "padded tokens per token") if run.plan.kind == "stock" else ():
        run.report.facts.pop(fact, None)
    logger.warning(f"batches: {run.plan.kind} ({choice.unproven or choice.reason})")


def _install(run: Run, stack: ExitStack) -> None:
    """Install the chosen path, or plan other rows if the check cannot confirm it; an explicit path stops instead."""
    dataset = run.trainer.train_dataset
    if run.training and isinstance(dataset, Dataset) and is_token_lists(dataset, ("input_ids",)):
        check_vocabulary(dataset, vocabulary(run.model), padding_free=run.trainer.padding_free)
    stack.enter_context(patch_attribute(run, "kinds", Kinds(run.model)))  # for all features: they treat a kind alike
    if run.training:
        tell_stock_error(run)
    attempt = stack.enter_context(ExitStack())
    attention = attempt.enter_context(
        packed_attention(
            run.model, run.choice.path, compute_dtype=run.compute_dtype, device=run.device, vision_tower=False
        )
    )
    attention.remark = partial(run.report.remark, "packed_attention")
    refuses_static = partial(BACKENDS[attention.path].refuses_static, features=attention.features)
    attempt.enter_context(patch_attribute(run, "refuses_static", refuses_static))
    attempt.enter_context(patch_attribute(run, "attention", attention))
    if not run.training and is_examined(run):
        return
    if failed := run.ranks.first_reason(lambda: _failure(run, attention)):
        attempt.close()
        padded = Choice(PADDED_DOCUMENTS, failed, setting=run.choice.setting)
        _replan(run, replace(run.choice, unproven=failed) if run.plan.kind == "padding_free" else padded)
