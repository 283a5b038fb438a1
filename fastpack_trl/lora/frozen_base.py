"""The feature `frozen_base`: frozen LoRA bases multiplied in FP8 while a trainer trains, forward and backward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf, isnan
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.kernels.fp8 import failure_of_products
from fastpack_trl.lora.base_weight import HasFrozenWeight, is_fp8_linear
from fastpack_trl.lora.fp8_layers import (
    MOST_ERROR,
    product_errors,
    products_ratio,
    put_in_fp8,
    reasons_against,
    stays_on_device,
)
from fastpack_trl.lora.report import FrozenCopies, LoraReport, has_lora, shown_bytes
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.facts import UNREADABLE, backbones, learned_positions, token_table
from fastpack_trl.model.upstream import missing_reason
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.run import DEEPSPEED, SHARDED, Run

logger = logging.getLogger(__name__)

FEATURE = "frozen_base"
_KEEP = "set frozen_base='as_loaded'"
_SAMPLE = 256
"""Tokens of the data over which the errors are measured."""
_SHARE_OF_FREE = 0.25
_TIMED_TOKENS = 8192
_WORTH = 1.1


@contextmanager
def frozen_base(run: Run) -> Iterator[None]:
    """Put the frozen weights of LoRA layers in FP8; layers that lose too much stay as they were loaded, counted.

    Raises:
        ValueError: the run, the model or the device cannot; with the remedy.
    """
    if run.settings.frozen_base == "as_loaded" or not run.training:
        yield
        return
    if reason := _refusal(run):
        raise ValueError(f"frozen_base='fp8': {reason}")
    applied = run.get_state(LoraReport)
    if applied is None:
        raise ValueError(f"frozen_base='fp8' needs the fast LoRA layers, which are off: the report says why; {_KEEP}")
    layers: dict[str, Any] = {
        name: each for name, each in run.model.named_modules() if isinstance(each, HasFrozenWeight)
    }
    dtype = run.compute_dtype or next(run.model.parameters()).dtype
    against = reasons_against(run.model, layers)
    able = {name: layer for name, layer in layers.items() if name not in against}
    others = Counter(against.values())
    others.update({reason: len(names) for reason, names in applied.handed_over.items()})
    others.update({"LoRA on stacked parameters": len(applied.on_parameters)} if applied.on_parameters else {})
    if not able:
        listed = "; ".join(f"{count} ({reason})" for reason, count in others.items())
        raise ValueError(f"frozen_base='fp8': no LoRA layer can have it: {listed}; {_KEEP}")
    on_host = run.ranks.count == 1
    try:
        for layer in able.values():
            if is_fp8_linear(layer.base_layer):  # for the sample too: transformers' forward needs a kernel from the hub
                put_in_fp8(layer, dtype, both_layouts=False, to_host=False)
        errors = _worst_errors(run, product_errors(able, dtype, lambda: _run_sample(run)))
        chosen = {name: layer for name, layer in able.items() if errors[name] <= MOST_ERROR}
        if not chosen:
            raise ValueError(
                f"frozen_base='fp8': products of all {len(able)} layers are off by more than {MOST_ERROR:.0%}; {_KEEP}"
            )
        for name in able.keys() - chosen.keys():
            able[name]._fastpack_drop_copy()
            others[f"an error over {MOST_ERROR:.0%}"] += 1
        free = run.ranks.all_min([allocatable(run.device) if run.device.type == "cuda" else inf])[0]
        both = _both_layouts(chosen, free, on_host=on_host)
        for layer in chosen.values():
            put_in_fp8(layer, dtype, both_layouts=both, to_host=on_host)
        rest = [layer for name, layer in layers.items() if name not in chosen]
        applied.copies = FrozenCopies(rest, run.compute_dtype)
        if applied.copies and run.settings.cache_dequantized == "on":
            applied.copies.keep()
        run.set_status(FEATURE, "on", "fp8", _described(chosen, errors, others, both=both))
        _advise(run, chosen, dtype)
        yield
        _remark_on_lost(run, chosen)
    finally:
        _put_back(able.values())


def _remark_on_lost(run: Run, chosen: Mapping[str, Any]) -> None:
    """Name how many layers ended the run with another weight than that in FP8."""
    if lost := sum(not layer.fastpack_multiplies_in_fp8 for layer in chosen.values()):
        run.report.remark(
            FEATURE,
            f"{lost} of {len(chosen)} layers ended the run as loaded: merged into, moved or written to in the middle "
            "of it",
        )


def _put_back(layers: Iterable[Any]) -> None:
    """Give layers their loaded weights back; what the device has no room for stays in host memory, named."""
    layers = list(layers)
    for layer in layers:
        layer._fastpack_drop_dense()  # of all first: it makes room
    left = 0
    for layer in layers:
        try:
            layer._fastpack_fetch_weight()
        except torch.OutOfMemoryError:
            layer.fastpack_on_host.restore(to_device=False)
            del layer.fastpack_on_host
            left += 1
    if left:
        logger.warning(
            f"frozen_base: the device has no room for the weights of {left} layers, which stay in host memory: free "
            "some, then call model.to(device)"
        )


def _refusal(run: Run) -> str:
    """Return why this run cannot have it, with the remedy; empty where it can."""
    if run.settings.lora == "off":
        return f"lora='off' leaves LoRA layers to PEFT, which has no FP8 products; set lora='auto', or {_KEEP}"
    if not has_lora(run.model):
        return (
            "the model has no LoRA layers, and full fine-tuning changes the weights that would be quantised once; give "
            f"peft_config=LoraConfig(...), or {_KEEP}"
        )
    if run.is_sharded or run.is_deepspeed:
        return f"{SHARDED if run.is_sharded else DEEPSPEED}; train with DDP, or {_KEEP}"
    if run.args.n_gpu > 1:
        return f"torch.nn.DataParallel copies the model in each step; start it with accelerate launch, or {_KEEP}"
    if missing := missing_reason(FEATURE):
        return f"{missing}; {_KEEP}"
    return _refused_by_device(run)


def _refused_by_device(run: Run) -> str:
    """Return why the device has no products in FP8; the plain torch reference runs on any, in fp32 too."""
    device = run.device
    if device.type != "cuda":
        return f"a {device.type} device has no FP8 products; train on a CUDA device from Ada or Hopper on, or {_KEEP}"
    dtype = run.compute_dtype or next(run.model.parameters()).dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the run computes in {dtype}, and FP8 products give 16 bits; set bf16=True, or {_KEEP}"
    if failure := failure_of_products(device, dtype):
        return f"{torch.cuda.get_device_name(device)} has no FP8 products in {dtype}: {failure}; {_KEEP}"
    return ""


def _worst_errors(run: Run, errors: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the larger error of each layer, over all processes; infinite where one is NaN."""
    worst = [inf if any(map(isnan, both)) else max(both) for both in errors.values()]
    return dict(zip(errors, run.ranks.all_max(worst), strict=True))


def _run_sample(run: Run) -> None:
    """Run the decoder over the first document of the data, in evaluation mode; where it cannot be run, do nothing."""
    try:
        decoder = backbones(run.model)[0]
        ids = _sample(run)
        batch = PackedBatch.from_lengths((ids.shape[1],)).to(run.device)
        kwargs = to_transformers_kwargs(batch) | ({"packed_batch": batch} if run.packs else {}) | {"use_cache": False}
        with isolated_run(run.model, training=False), run.autocast():
            decoder(input_ids=ids, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except UNREADABLE:
        return  # random values take the place of what its layers would have read


def _sample(run: Run) -> Tensor:
    """Return token ids, (1, tokens): those of the first row of the data, or any where it cannot be looked at."""
    vocabulary = token_table(run.model).num_embeddings
    tokens = min(_SAMPLE, learned_positions(run.model) or _SAMPLE)
    data: Any = run.trainer.train_dataset
    try:
        ids = list(data[0]["input_ids"])[:tokens]
    except (*UNREADABLE, NotImplementedError):
        ids = []
    return torch.tensor([ids or list(range(min(tokens, vocabulary)))], device=run.device)


def _both_layouts(layers: Mapping[str, Any], free: float, *, on_host: bool) -> bool:
    """Return whether the second layout takes at most a quarter of the memory that is free beside the first.

    Weights of FP8 checkpoints have the first.

    Args:
        layers: whose weights go to FP8.
        free: bytes on the device before that; infinite off CUDA.
        on_host: dense weights leave the device, one by one.

    Raises:
        ValueError: one layout does not fit.
    """
    bases = [layer.base_layer for layer in layers.values()]
    leaves = sum(base.weight.nbytes for base in bases if not stays_on_device(base)) if on_host else 0
    second = sum(layer.in_features * layer.out_features for layer in layers.values())
    nbytes = second - sum(base.weight.nbytes for base in bases if is_fp8_linear(base))
    if nbytes > free + leaves:
        raise ValueError(
            f"frozen_base='fp8': {shown_bytes(nbytes)} of FP8 weights do not fit the {shown_bytes(free + leaves)} that "
            f"are free on the device; {_KEEP}"
        )
    return second <= _SHARE_OF_FREE * (free + leaves - nbytes)


def _described(chosen: Mapping[str, Any], errors: Mapping[str, float], others: Mapping[str, int], *, both: bool) -> str:
    worst = max(chosen, key=lambda name: errors[name])
    nbytes = sum(layer.fastpack_dense.nbytes for layer in chosen.values())
    host = sum(layer.fastpack_on_host.nbytes for layer in chosen.values() if layer.fastpack_on_host is not None)
    total = len(chosen) + sum(others.values())
    own = sum(is_fp8_linear(layer.base_layer) for layer in chosen.values())
    parts = [
        f"{len(chosen)} of {total} LoRA bases multiply in FP8, forward and backward: what is computed changes",
        *([f"{own} with the values and block scales of the checkpoint, not quantised again"] if own else []),
        f"a product is off by {median(errors[name] for name in chosen):.1%}, at most {errors[worst]:.1%} ({worst})",
        f"{shown_bytes(nbytes)} of FP8 weights, {'both layouts' if both else 'transposed per use'}",
        f"the loaded weights ({shown_bytes(host)}) wait in host memory"
        if host
        else "the loaded weights stay on the device",
        "evaluation during training is in FP8 too, all after training as loaded",
    ]
    parts += [f"as loaded: {count} ({reason})" for reason, count in others.items()]
    return "; ".join(parts)


def _advise(run: Run, layers: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
    """Time the products alone on the device, and advise against FP8 where they gain little."""
    if run.device.type != "cuda":
        return
    rows = run.args.per_device_train_batch_size * (run.args.max_length or _TIMED_TOKENS)
    tokens = min(_TIMED_TOKENS, rows)
    try:
        ratio = products_ratio(layers, tokens, dtype)
    except torch.OutOfMemoryError:
        ratio = inf  # not timed here
    ratio = run.ranks.all_min([ratio])[0]
    if ratio < inf:
        said = (
            f"products alone, quantisation included, take {1 / ratio:.2f} of the time in {dtype} over {tokens:,} tokens"
        )
        run.report.remark(FEATURE, said if ratio >= _WORTH else f"{said}: too small a model to gain; {_KEEP}")
