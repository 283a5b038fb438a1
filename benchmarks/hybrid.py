"""Hybrid models: forward and backward of packed rows beside stock's padded batch of the same documents.

Stock runs as installed: without ``fla``, ``causal_conv1d`` and ``mamba_ssm`` its own functions in torch. On CUDA a row
has the shape of Qwen3.5-4B with fewer layers (LoRA, bf16); beside its times are the device's milliseconds by kind of
kernel, and the error of a delta rule in an fp32 and in a bf16 layer, against float64.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Run, seconds_of
from benchmarks.command import CaseCommand, Record
from benchmarks.readme_cells import grid, ratio_cell
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.result_file import ResultFile, RowTask
from fastpack_trl.compile.layers import CompiledLayers, compiled_layers
from fastpack_trl.measure.intervals import ratio_summary, summary
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.recurrent.delta import packed_delta

STOCK, STOCK_COMPILED, OURS, OURS_COMPILED = "stock, padded", "stock, padded, compiled", "packed", "packed, compiled"
SIDES = (STOCK, STOCK_COMPILED, OURS, OURS_COMPILED)
_SMALL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("qwen3_5_text", {**_SMALL, **_DELTA}),
    "mamba2": (
        "granitemoehybrid",
        {**_SMALL, "num_local_experts": 0, "shared_intermediate_size": 768, "mamba_n_heads": 8, "mamba_d_head": 64,
         "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_expand": 2, "layer_types": ["mamba"] * 3 + ["attention"]},
    ),
    "qwen3.5-4b": (
        "qwen3_5_text",
        {**_SMALL, **_DELTA, "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "max_position_embeddings": 16384},
    ),
}  # fmt: skip
UNEQUAL, EQUAL = (321, 300, 280, 250, 230, 220, 200, 167, 80), (256,) * 8
LONG = (1883, 1400, 1100, 900, 800, 700, 500, 400, 300, 209)
_COMPILED = ", compiled"
ROWS: dict[str, tuple[str, tuple[int, ...]]] = {
    "delta": ("delta", UNEQUAL), "delta, equal lengths": ("delta", EQUAL), "mamba2": ("mamba2", UNEQUAL),
    "mamba2, equal lengths": ("mamba2", EQUAL), "delta, compiled": ("delta", UNEQUAL),
    "mamba2, compiled": ("mamba2", UNEQUAL), "qwen3.5-4b": ("qwen3.5-4b", LONG),
    "qwen3.5-4b, compiled": ("qwen3.5-4b", LONG),
}  # fmt: skip
"""Model and documents of each row, by its name; of some also with compiled layers, on both sides. Stock's graphs hold a
step for each chunk of the longest document, and take minutes to compile."""
_KINDS = (("products", ("gemm", "nvjet", "cutlass", "xmma")), ("solver", ("trsm",)), ("copies", ("copy", "Cat", "Mem")))


def measure(run: Run, rows: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Time both sides of every row in turns.

    Args:
        rows: model and tokens per document, by name.

    Returns:
        A record; a row has ``sides`` with seconds of a forward and a backward pass, ``ratios`` of stock's to ours and,
        on CUDA, ``kernels_ms`` and ``errors``.
    """
    tasks = [
        RowTask(
            {"setting": name, "documents": list(lengths), "padding_factor": len(lengths) * max(lengths) / sum(lengths)},
            partial(_row, run, model, lengths, name.endswith(_COMPILED)), {"sides": {}, "ratios": {}},
        )
        for name, (model, lengths) in rows.items()
    ]  # fmt: skip
    return run.record("hybrid", tasks, {"models": {name: MODELS[name][0] for name in MODELS}})


def _row(run: Run, name: str, lengths: tuple[int, ...], compiled: bool, seconds: float) -> dict[str, Any]:
    model = _model(run, name)
    ids = torch.randint(3, 500, (1, sum(lengths)), generator=torch.Generator().manual_seed(run.seed)).to(run.device)
    batch = PackedBatch.from_lengths(lengths).to(run.device)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], Any]] = {}
        stack.enter_context(packed_attention(model))  # without the keyword it is stock
        sides[STOCK] = partial(_padded_pass, model, ids, lengths)
        sides[OURS] = partial(_packed_pass, model, ids, batch)
        if compiled:
            theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
            for layer in theirs.get_submodule("model.layers"):
                layer.compile()
            stack.enter_context(packed_attention(ours))
            layers = stack.enter_context(compiled_layers(ours, verbose=False))
            sides[STOCK_COMPILED] = partial(_padded_pass, theirs, ids, lengths)
            sides[OURS_COMPILED] = partial(_compiled_pass, layers, ours, ids, batch)
        calls = {side: partial(_timed, side, call, run.device) for side, call in sides.items()}
        found = take_turns(calls, rounds=run.rounds, warmup=2, seconds=seconds)
        values = found.results
        result: dict[str, Any] = {
            "sides": {side: {"seconds": summary(each)} for side, each in values.items()},
            "failed": found.failed,
            "ratios": {
                f"{other} / {own}": ratio_summary(values[other], values[own])
                for own in (OURS, OURS_COMPILED) for other in (STOCK, STOCK_COMPILED)
                if own in values and other in values
            },
        }  # fmt: skip
        if run.device == "cuda":
            result |= {"kernels_ms": _kernels(sides[OURS]), "errors": _errors(lengths, run.device)}
    return result


def _model(run: Run, name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, fields = MODELS[name]
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    if run.device != "cuda":
        return model.float().train()
    from peft import LoraConfig, get_peft_model

    model = model.to(run.device, torch.bfloat16).train()
    lora = LoraConfig(r=16, target_modules=r".*\.(in_proj\w*|out_proj|[qkvo]_proj|\w+_proj)")
    return get_peft_model(model, lora).base_model.model


def _timed(side: str, call: Callable[[], Any], device: str) -> float:
    """Return the seconds of a pass, and say them: some sides take minutes, stock's Mamba-2 one a pass."""
    took = seconds_of(call, device)
    print(f"  {side}: {took:.2f} s", file=sys.stderr, flush=True)
    return took


def _compiled_pass(layers: CompiledLayers, model: Any, ids: Tensor, batch: PackedBatch) -> None:
    _packed_pass(model, ids, batch)
    if "eager" in layers.path:  # what cannot be compiled runs, and would be timed under a wrong name
        raise RuntimeError(f"ran eager: {layers.reason}")


def _packed_pass(model: Any, ids: Tensor, batch: PackedBatch) -> None:
    batch.clear_derived()
    _pass(model, input_ids=ids, packed_batch=batch, **to_transformers_kwargs(batch))


def _padded_pass(model: Any, ids: Tensor, lengths: tuple[int, ...]) -> None:
    documents = ids[0].split(lengths)
    rows = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in documents], batch_first=True)
    _pass(model, input_ids=rows, attention_mask=mask)


def _pass(model: Any, **keywords: Any) -> None:
    model.zero_grad()
    model(use_cache=False, **keywords).logits.float().square().mean().backward()


def _kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of a pass by kind of kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profiled.key_averages():
        kind = next((kind for kind, parts in _KINDS if any(part in event.key for part in parts)), "other")
        found[kind] += event.self_device_time_total / 1e3
    return dict(found)


def _errors(lengths: tuple[int, ...], device: str) -> dict[str, float]:
    """Return the error of a delta rule against float64, relative, of an fp32 layer and of a bf16 layer."""
    generator = torch.Generator(device).manual_seed(0)
    chunks = chunks_of(PackedBatch.from_lengths(lengths).to(device))
    shapes = ((2, 128), (2, 128), (4, 128), (4,), (4,))
    query, key, value, g, beta = (
        torch.randn(sum(lengths), *shape, generator=generator, device=device) for shape in shapes
    )
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    g, beta = -g.abs(), beta.sigmoid()

    def rule(dtype: torch.dtype) -> Tensor:
        return packed_delta(query.to(dtype), key.to(dtype), value.to(dtype), g.to(dtype), beta.to(dtype), chunks)

    exact = rule(torch.float64)
    return {
        # A 16-bit layer's own rounding is in its error; that of TF32 alone is what is more than of its inputs in fp32.
        name: float((rule(dtype).double() - exact).norm() / exact.norm())
        for name, dtype in (("fp32", torch.float32), ("bf16 with TF32 inside", torch.bfloat16))
    }


def table(record: Record) -> str:
    """Return a few lines per row: milliseconds of each side, and how much faster ours are."""
    return "\n".join(line for row in record["rows"] for line in _lines(row))


def markdown(record: Record) -> str:
    """Return the record for a page."""
    compared = (STOCK, OURS), (STOCK, OURS_COMPILED), (STOCK_COMPILED, OURS_COMPILED)
    pairs = [f"{other} / {own}" for other, own in compared]
    rows = []
    for row in (row for row in record["rows"] if not row.get("skipped")):
        sides, ratios = row["sides"], row["ratios"]
        ms = (f"{sides[side]['seconds']['median'] * 1e3:,.0f}" if side in sides else "-" for side in SIDES)
        over = (ratio_cell(ratios[pair]) if pair in ratios else "-" for pair in pairs)
        rows.append([row["setting"], f"{row['padding_factor']:.2f}", *ms, *over])
    said = (
        "**Hybrid models**: milliseconds of a forward and a backward pass, stock's padded batch beside the packed row "
        "of the same documents; *delta*: a small Qwen3.5, *mamba2*: a small Granite hybrid, *qwen3.5-4b*: four layers "
        "of its shape, LoRA, bf16. *padding*: tokens of stock's batch by those of the documents."
    )
    head = "documents | >padding | >stock | >stock, compiled | >packed | >packed, compiled | >packed over stock"
    return f"{said}\n\n{grid(head + ' | >compiled over stock | >compiled over compiled', rows)}"


def _lines(row: Mapping[str, Any]) -> list[str]:
    if row.get("skipped"):
        return [f"{row['setting']:24} skipped: {row['skipped']}"]
    times = "; ".join(f"{name} {side['seconds']['median'] * 1e3:.0f} ms" for name, side in row["sides"].items())
    ratios = [f"    {name}: {ratio_cell(ratio)}" for name, ratio in row["ratios"].items()]
    more = [f"    {name}: {row[name]}" for name in ("kernels_ms", "errors", "failed") if row.get(name)]
    return [f"{row['setting']:24} padding {row['padding_factor']:.2f}: {times}", *ratios, *more]


def _record(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    run = Run.of(args, file)
    names = args.rows or [name for name in ROWS if name.startswith("qwen3.5-4b") == (run.device == "cuda")]
    return measure(run, {name: ROWS[name] for name in names})


COMMAND = CaseCommand(
    case="hybrid", help=__doc__, rows=ROWS, default_rows=(), rounds=7, seconds=180.0, record=_record, table=table
)

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
