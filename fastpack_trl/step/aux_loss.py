"""The feature `aux_loss`: the load-balancing loss of a mixture-of-experts model, all layers at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.logging import get_logger

from fastpack_trl.run import Run

logger = get_logger(__name__)


@contextmanager
def aux_loss(run: Run) -> Iterator[None]:
    """Name the load-balancing loss of a run: ours where the loss is (`run.loss_is_ours`), else stock's."""
    trainer, args = run.trainer, run.args
    if not getattr(trainer, "aux_loss_enabled", False):
        yield
        return
    given = args.router_aux_loss_coef is not None
    source = "the arguments" if given else "the model's config (router_aux_loss_coef)"
    reason = f"coefficient {trainer.router_aux_loss_coef:g}, from {source}"
    if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        reason += "; without effect: reentrant checkpointing drops its gradient, set use_reentrant=False"
        logger.warning(f"aux_loss: {reason}")
    if run.loss_is_ours:
        if args.pad_to_multiple_of:
            reason += "; without the padding of packed rows"
        run.set_status("aux_loss", "on", "stacked", reason)
    else:
        run.set_status("aux_loss", "stock", "stock", f"{reason}; as the loss (sync_free)")
    yield
