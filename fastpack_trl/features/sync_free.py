"""The option `sync_free`: a step that does not synchronize, and the reasons why parts of it do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import is_prompt_learning, text_model
from fastpack_trl.model.hooks import LOOP_METHODS, needs_logits, replaced_methods
from fastpack_trl.run import DEEPSPEED, Run
from fastpack_trl.step.load_balancing import replaced_by
from fastpack_trl.step.loss import head_of
from fastpack_trl.step.sync_free import EVALUATION, SyncFreeStep

_REENTRANT = "it is without effect: reentrant checkpointing drops its gradient, set use_reentrant=False"
_STATE = ("_metrics", "_total_train_tokens", "_tp_size", "aux_loss_enabled", "router_aux_loss_coef")


def prepare(run: Run) -> None:
    """Lay our forward around TRL's, before accelerate wraps the model, unless the option is off."""
    if run.settings.sync_free != "off":
        run.sync_free = SyncFreeStep(run.model)
        run.backbone = run.sync_free.forward.call_backbone


def why_not(run: Run) -> Iterator[object]:
    """Yield why nothing of the step is ours."""
    yield run.sync_free is None and "switched off when the trainer was made"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Make no device-to-host sync between two logs, as far as the run permits."""
    step: SyncFreeStep = run.sync_free
    # Joint, because TRL's loss gathers its figures in each micro-batch, ours between two logs.
    stock = run.ranks.first_reason(lambda: why_stock_loss(run))
    own_step = replaced_methods(run.trainer, (*LOOP_METHODS, "training_step", "floating_point_ops"))
    remarks = _remarks(run, own_step)
    host = not run.is_deepspeed
    ours = (["loss, metrics"] if not stock else []) + (["host work"] if host else [])
    path = "host work only" if ours == ["host work"] else ", ".join(ours) or "stock"
    why = f"TRL's loss and metrics: {stock}" if stock else "logits computed once"
    run.set_status("sync_free", "on" if ours else "stock", path, "; ".join([why, *remarks]), holds=not stock and host)
    run.loss_is_ours = not stock
    try:
        # The filter is switched on again by what `host` replaces.
        with step.running(run.trainer, loss=not stock, host=host, filters=host and not own_step):
            yield
    finally:
        run.loss_is_ours = False


def why_stock_loss(run: Run) -> str:
    """Return why TRL computes loss and metrics in this run, or ``""``."""
    return first_reason(_only_stock_loss(run))


def _only_stock_loss(run: Run) -> Iterator[object]:
    trainer, step, model = run.trainer, run.sync_free, run.model
    lacks = [f"SFTTrainer.{name}" for name in _STATE if name not in vars(trainer)]
    yield lacks and f"trl lacks {', '.join(lacks)}"
    yield not run.packs and run.plan.reason
    yield needs_logits(trainer)
    yield is_prompt_learning(model) and "prompt learning puts virtual tokens before each row"
    plan = trainer.accelerator.parallelism_config
    sizes = [getattr(plan, f"{name}_size", 1) for name in ("tp", "cp", "sp")] if plan is not None else []
    yield any(size > 1 for size in sizes) and "tensor, context or sequence parallelism"
    flat = trainer.is_fsdp_enabled and not run.is_fsdp2
    yield flat and "FSDP version 1 flattens the head: set fsdp_version=2"
    yield run.is_deepspeed and run.is_sharded and "ZeRO-3 shards the head"
    devices = set((getattr(text_model(model), "hf_device_map", None) or {}).values())
    yield len(devices) > 1 and f"the model is spread over {', '.join(sorted(map(str, devices)))}"
    yield step.forward.missing
    yield not step.forward.in_place and "the model's forward was replaced"
    yield head_of(text_model(model))  # a text where it has none of ours, else a module
    other = trainer.aux_loss_enabled and replaced_by()
    yield other and f"load_balancing_loss_func was replaced by {other}"


def _remarks(run: Run, own_step: str) -> list[str]:
    """Return which other parts still synchronize or run TRL's code."""
    args, trainer = run.args, run.trainer
    stays = bool(own_step) and not run.is_deepspeed
    is_reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    counts = str(args.include_num_input_tokens_seen).lower() not in ("no", "false")
    remarks = (
        args.fp16 and "the loss scaler of fp16 synchronizes once per optimizer step",
        trainer.compute_metrics is not None and EVALUATION,
        stays and f"the NaN filter synchronizes: {own_step} may look at the loss",
        counts and "include_num_input_tokens_seen synchronizes in each micro-batch",
        run.is_deepspeed and f"TRL's host work and NaN filter: {DEEPSPEED}",
        trainer.aux_loss_enabled and f"load-balancing loss with coefficient {trainer.router_aux_loss_coef:g}",
        trainer.aux_loss_enabled and is_reentrant and _REENTRANT,
    )
    return [text for text in remarks if text]
