"""``fastpack-trl doctor``: show this machine, what a config would run and why, and in how much memory."""

from __future__ import annotations

import io
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from fastpack_trl.errors import UserError, preparing
from fastpack_trl.measure.record import machine, versions
from fastpack_trl.measure.tables import aligned
from fastpack_trl.recipe.arguments import processes, split_off
from fastpack_trl.recipe.gpus import COMMON, gpu_of
from fastpack_trl.recipe.make_trainer import check_settings, make_trainer, short_run_arguments
from fastpack_trl.recipe.methods import add_trainer
from fastpack_trl.recipe.paths import titled
from fastpack_trl.recipe.yaml import load_config

EXTRAS = {
    "qlora": ("bitsandbytes", "4-bit and 8-bit base weights (load_in_4bit, load_in_8bit)"),
    "fa4": ("flash_attn.cute", "packed_attention='flash_attention_4' on Hopper and Blackwell"),
    "fla": ("fla", "the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo hybrid on CUDA"),
    "xformers": ("xformers", "packed_attention='xformers'"),
    "liger": ("liger_kernel", "use_liger_kernel"),
    "plots": ("matplotlib", "plots of training and benchmark figures"),
    "notebooks": ("nbclient", "running the notebooks from the command line"),
}
"""Extra of this package -> the module that it brings, and what needs it."""

_OPTIONAL = ("triton", "bitsandbytes", "xformers", "flash_attn", "liger_kernel", "kernels")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl doctor``; imports nothing heavy."""
    add = parser.add_argument
    config = "show what a YAML of a training command would run; that command's options are accepted too"
    add("--config", metavar="FILE", help=config)
    gpu_help = "predict memory on GPUs that are not here: names (4090, H100, ...) or 24GiB,8.9; reads no weights"
    add_trainer(parser)
    add("--gpu", metavar="GPU", nargs="+", help=gpu_help)
    add("--gpus", metavar="N", type=int, help="with --gpu: memory per GPU on so many, under DDP and FSDP 2")


def run(args: Namespace, record: dict[str, Any]) -> int:
    """Print and record each section as soon as it is complete; return 0: a missing package is a finding, no failure."""
    if (args.gpu or args.more) and not args.config:
        raise UserError(f"{'--gpu' if args.gpu else '--trainer'} needs a config: give --config FILE")
    if args.gpus is not None and (args.gpus < 1 or not args.gpu):
        raise UserError(f"--gpus={args.gpus} must be >= 1 and needs a kind of GPU: add --gpu H100, for example")
    record["error"] = None
    config = load_config(args.config) if args.config else {}  # refuse a wrong name before looking at the machine
    from transformers.utils import is_torch_bf16_gpu_available

    bf16, use_cpu = (
        str((split_off(name, args.more)[0] or [config.get(name, default)])[-1]).lower() in ("true", "")
        for name, default in (("bf16", True), ("use_cpu", False))
    )
    lacks_gpu = not args.gpu and bf16 and not use_cpu and not is_torch_bf16_gpu_available()
    # Under `accelerate launch` and torchrun only the first process prints.
    output = nullcontext() if os.environ.get("RANK", "0") == "0" else redirect_stdout(io.StringIO())
    with output, TemporaryDirectory(prefix="fastpack-doctor-") as folder:
        if not args.gpu:
            _machine(record)
        if args.config and (args.gpu or lacks_gpu):
            _forecast(record, args, folder)
            if not args.gpu:
                print("no GPU here: name one with --gpu (4090, or 24GiB,8.9); on a CPU: use_cpu: true, bf16: false")
        elif args.config:
            _config(record, args, folder)
    return 0


def _section(title: str, rows: Mapping[str, Any]) -> None:
    print("\n".join([title, *(f"  {line}" for line in titled(rows)), ""]), flush=True)


def _forecast(record: dict[str, Any], args: Namespace, folder: str) -> None:
    """Show the memory of a step on each GPU, part by part, the features, and a change if it does not fit."""
    gpus = [gpu_of(text) for text in args.gpu or COMMON]
    # Without --use_cpu transformers refuses bf16 on a machine that lacks such a GPU.
    read = partial(short_run_arguments, args.config, folder, *args.more, "--use_cpu", "True", may_launch=True)
    arguments = read()
    if not (arguments.training.bf16 or arguments.training.fp16 or split_off("bf16", args.more)[0]):
        print("planned with bf16: true, as for a GPU; the config has bf16: false (give --bf16 false to plan that)\n")
        arguments = read("--bf16", "True")
    from fastpack_trl.recipe.forecast import LONGEST, forecast

    if (count := args.gpus or processes(arguments.launch)) > 1:
        gpus = [replace(gpu, processes=count, shards=shards) for gpu in gpus for shards in (False, True)]
    with preparing():
        check_settings(arguments, runs=False)
        report = record["forecast"] = forecast(arguments, gpus)
    rows = report["gpus"].values()
    row, most = report["row_tokens"], report["max_length"]
    count = f"{row // most} x {most:,} = " if row and row > most and row % most == 0 else ""
    lengths = [row["row_tokens"] or 0 for row in rows]  # FSDP 2 merges no micro-batches
    of_rows = f", rows of {count}{row:,} tokens" if row and len({*lengths}) == 1 else ""
    longest = [row.get("longest_row", 0) for row in rows]
    cells = [[f"memory of a step{of_rows}, GiB", *report["gpus"]]]
    cells += [] if of_rows or not row else [["tokens of a row", *(f"{length:,}" for length in lengths)]]
    cells += [["GPU memory", *(f"{row['gib']:.1f}" for row in rows)]]
    for part in dict.fromkeys(name for row in rows for name in row["parts_gib"]):
        if any(sizes := [row["parts_gib"].get(part) for row in rows]):
            cells.append([part, *map(_size, sizes)])
    cells += [
        ["total", *(_size(row["total_gib"]) + "+" * ("unknown" in row) for row in rows)],
        ["CUDA graphs, if recorded", *(_size(row.get("graphs_gib")) for row in rows)],
        ["fits", *(("yes" if row["fits"] else "NO") for row in rows)],
        ["longest row that fits", *(">= " * (length == LONGEST) + f"{length:,}" for length in longest)],
    ]
    print("\n".join([*aligned(cells), ""]))
    for name, row in report["gpus"].items():
        shown = {"activations": row.get("levels") or row["unknown"], **row["features"]}
        _section(name, shown | ({"suggestion": row["change"]} if "change" in row else {}))


def _size(gib: float | None) -> str:
    return "-" if gib is None else f"{gib:.2f}"


def _machine(record: dict[str, Any]) -> None:
    """Show versions, the device, what could be installed, and internal names of libraries that are not there."""
    from fastpack_trl.model.upstream import look_up

    # "unknown": a module that was not installed as a package
    optional = {module: _version(module.replace("_", "-")) or "unknown" for module in _OPTIONAL if _is_there(module)}
    record |= {"versions": versions() | optional, "device": _device(), "missing": list(_missing())}
    _section("versions", record["versions"])
    _section("device", record["device"])
    rows = {row["name"]: f"{row['needed_for']}: {row['install']}" for row in record["missing"]}
    _section("missing", rows or {"nothing": "every extra is installed"})
    names = record["upstream"] = look_up()
    lacking = {row["name"]: f"missing; needed by {', '.join(row['needed_by'])}" for row in names if not row["there"]}
    there = f"{len(names) - len(lacking)} of {len(names)}; docs/upstream.md says what each is for"
    _section("internal names of other libraries that features use", {"found": there, **lacking})


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _device() -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = {name: value for name, value in machine(device).items() if value} | {"threads": torch.get_num_threads()}
    if device == "cpu":
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "devices": torch.cuda.device_count(),
        "compute capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / (1 << 30):.1f} GiB",
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
    }


def _missing() -> Iterator[dict[str, str]]:
    """Yield what could be installed, what needs it, and the command; packages outside of their range come first."""
    from packaging.requirements import Requirement

    # Empty when run from a checkout that is not installed.
    for one in map(Requirement, metadata.requires("fastpack-trl") or () if _version("fastpack-trl") else ()):
        version = _version(one.name)
        is_wanted = one.marker is None or one.marker.evaluate({"extra": ""})
        if is_wanted and not (version and one.specifier.contains(version, prereleases=True)):
            needed_for = f"fastpack-trl needs {one.name}{one.specifier}, found {version or 'none'}"
            yield {"name": one.name, "needed_for": needed_for, "install": f"pip install '{one.name}{one.specifier}'"}
    extras = [
        (module, needed_for, "--pre " * (extra == "fa4") + f"'fastpack-trl[{extra}]'")
        for extra, (module, needed_for) in EXTRAS.items()
    ]
    for module, needed_for, package in [*extras, ("triton", "our Triton kernels; without it torch runs", "triton")]:
        if not _is_there(module):
            yield {"name": module, "needed_for": needed_for, "install": f"pip install {package}"}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, OSError, RuntimeError):  # it imports the package around a module, which may be broken
        return False


def _config(record: dict[str, Any], args: Namespace, folder: str) -> None:
    """Show the banner of the trainer that training would make, also if fastpack is disabled."""
    arguments = short_run_arguments(args.config, folder, *args.more)
    if arguments.launch and "WORLD_SIZE" not in os.environ:
        print(f"one process; options of `accelerate launch` are ignored: {' '.join(arguments.launch)}\n", flush=True)
    with preparing(), redirect_stdout(io.StringIO()):
        trainer = make_trainer(arguments)
        with trainer._fastpack_features(announce=True):  # which fills the report
            pass
    record["config"] = {"not_used": arguments.launch, **trainer.fastpack_report.to_dict()}
    print(f"{trainer.fastpack_report.table()}\n", flush=True)
