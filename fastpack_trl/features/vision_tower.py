"""The option `vision_tower`: the attention of image towers in one call per layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from fastpack_trl.features.feature import Met
from fastpack_trl.run import Run
from fastpack_trl.vision.tower import one_call_towers, tower_attention

FEATURE = "vision_tower"


def concerns(run: Run) -> bool:
    """Return whether the model has a tower whose attention gets the ends of images, or the user asks for one."""
    return run.settings.is_explicit(FEATURE) or bool(tower_attention(run.model))


def why_not(run: Run) -> Iterator[object]:
    """Yield why transformers' code runs in all layers."""
    yield not tower_attention(run.model) and "the model has no tower that attends by the ends of images"
    yield run.args.torch_compile and "torch_compile=True compiles the whole model"
    names = {str(module.config._attn_implementation) for module in tower_attention(run.model)}
    if all("flash" in name for name in names):
        yield Met(f"attn_implementation={min(names)!r} has one call per layer")


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Switch the attention of towers whose classes prove equal; before the plan, which counts what layers keep."""
    reference = getattr(run.trainer, "ref_model", None)
    same = one_call_towers(reference, dtype=run.compute_dtype) if reference is not None else nullcontext()
    with one_call_towers(run.model, dtype=run.compute_dtype) as report, same:  # equal models round alike
        on = bool(report.switched)
        run.set_status(FEATURE, "on" if on else "stock", report.path if on else "stock", str(report))
        yield
