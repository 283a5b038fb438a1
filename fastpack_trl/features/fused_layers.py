"""The option `fused_layers`: norms, rotations and gated activations of the layers in one kernel each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fastpack_trl.kernels._triton import LEAST_CAPABILITY, has_triton, is_supported
from fastpack_trl.layers.find import LIGER
from fastpack_trl.layers.replace import fused_layers
from fastpack_trl.model.facts import text_model
from fastpack_trl.run import SHARDED, Run

FEATURE = "fused_layers"


def why_not(run: Run) -> Iterator[object]:
    """Yield why the library's code runs in all layers."""
    yield run.args.torch_compile and "torch_compile=True compiles the whole model"
    yield run.is_sharded and not run.is_fsdp2 and SHARDED
    if run.settings.fused_layers == "auto":
        yield run.device.type != "cuda" and f"the model is on {run.device}: its kernels need CUDA"
        least = ".".join(map(str, LEAST_CAPABILITY))
        yield not is_supported(run.device) and f"its kernels need compute capability {least}"
        yield not has_triton() and "Triton is not installed"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Run fused forwards in the modules whose classes prove equal; before the plan, which counts what they keep."""
    dtype = run.compute_dtype or text_model(run.model).dtype
    autocast, gathers = run.compute_dtype is not None, run.is_sharded
    reference = getattr(run.trainer, "ref_model", None)
    device = getattr(run.trainer.accelerator, "device", None)  # a forecast has none
    apply = partial(fused_layers, dtype=dtype, autocast=autocast, gathers=gathers, device=device)
    same: AbstractContextManager[Any] = (
        nullcontext() if reference is None else apply(run.trainer.accelerator.unwrap_model(reference))
    )
    with apply(run.model) as report, same:  # equal models round alike
        fuses = bool(report.fused)
        path = "fused" if fuses else LIGER if LIGER in report.reasons.values() else "stock"
        run.set_status(FEATURE, "on" if fuses else "stock", path, str(report), holds=path != "stock")
        yield
