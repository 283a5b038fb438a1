"""The feature `moe`: mixture-of-experts layers with tokens sorted once, while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.logging import get_logger

from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.measured_speed import measured, what_trains
from fastpack_trl.moe.quantised import expert_dtypes, has_quantised_experts
from fastpack_trl.run import SHARDED, Run

logger = get_logger(__name__)


@contextmanager
def moe(run: Run) -> Iterator[None]:
    """Run mixture-of-experts layers on our path, while the model trains; evaluation by itself runs stock's.

    Raises:
        ValueError: the stacks are in four bits, and another setting asks for stock's path.
    """
    setting, model = run.settings.moe, run.model
    present = bool(experts_modules(model))
    run.expert_dtypes = expert_dtypes(model)
    # PEFT's own forward fails on four-bit stacks: they run on our path in evaluation too.
    quantised = present and has_quantised_experts(model)
    if not (run.training or quantised) or not (present or setting == "on"):
        yield
        return
    asked = (run.args.model_init_kwargs or {}).get("experts_implementation")
    why = "" if present else "the model has no experts that transformers dispatches"
    if setting == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = SHARDED
    elif asked is not None and setting != "on":
        why = f"experts_implementation={asked!r} was chosen"
    faster, note = measured(run.device.type, what_trains(model)) if present else (True, "")
    if present and run.device.type == "cuda" and not is_supported(run.device):
        faster, note = False, "its kernels need compute capability 8.0; moe='on' runs it in plain torch"
    if not why and not faster and setting == "auto" and not quantised:
        why = note
    if why and quantised:
        raise ValueError(
            f"moe_quantize_experts='on': {why}, and stock's experts cannot train in four bits; on several GPUs use DDP "
            "(accelerate_config: multi_gpu), otherwise leave out what chooses stock's, or moe_quantize_experts"
        )
    if why:
        run.say("moe", "stock" if present and setting != "off" else "off", "stock", why)
        yield
        return
    with apply_moe(model, lora=run.settings.lora != "off", force=setting == "on") as applied:
        for warning in applied.warnings:
            logger.warning(warning)
        said = "; ".join([applied.summary(), *[note] * bool(applied.active and note)])
        if applied.active:
            run.say("moe", "on", "fastpack", said)
        else:
            run.say("moe", "stock", "stock", said.removeprefix("stock: "))
        yield
