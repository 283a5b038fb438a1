"""``python -m benchmarks run``: train each side of each row in a process of its own; one JSON object per run.

    python -m benchmarks run --rows "qwen3-8b lora 4096" --sides trl fastpack --rounds 2 --json mine.jsonl
    python -m benchmarks run --rows "small lora 4x1" --threads 1 --steps 8
    python -m benchmarks run --rows "fsdp2 qwen3-8b lora 4096" --launcher accelerate --processes 2

A run is the first steps of a run of 500: the warm-up lasts until all that pays off in such a run has been decided, then
``--steps`` are timed, on a GPU as many more as fill 8 s, in windows of ten between two logs (six from 8B on), each to
the end of the device's work. Rows ``start ...`` are whole runs. The file of ``--json`` grows run by run, and the same
command continues it.
The variables BENCHMARKS_FLASH_ATTN_4 and BENCHMARKS_FLASH_LINEAR_ATTENTION name folders with these libraries that only
the sides of these names find: what is installed is taken by others too.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import Parser, known_names
from benchmarks.micro import ONE_SORT, metadata_per_layer, register_sorted_loop
from benchmarks.models import PAD, TEXTS
from benchmarks.records import REFERENCE, append, facts_of, read, short
from benchmarks.results_page import shown
from benchmarks.rows import METHODS, ROWS, RUN, Row
from benchmarks.sides import COMPARED
from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.process import OwnProcess
from fastpack_trl.bench.sides import compiled_regions
from fastpack_trl.bench.watch import LONGEST_WARMUP, SETTLING, Watch, run_side
from fastpack_trl.errors import UserError

FLASH_4 = "flash-attn-4"
FOLDERS = {FLASH_4: "BENCHMARKS_FLASH_ATTN_4", "flash-linear-attention": "BENCHMARKS_FLASH_LINEAR_ATTENTION"}
"""Libraries in the names of sides that train with them, and the variable with a folder that only such sides find."""
WINDOW = 10
"""Steps between two logs, which are timed together: a user's run does not wait for the device after each step."""
LEAST_SECONDS = 8.0
"""Least time of the timed steps on a GPU: rows of new lengths are captured during the first hundred steps or more."""
IMAGE_STEPS, IMAGE_WARMUP = 8, 40
"""Timed steps of a row on images, as many before them for TRL, which takes seconds for one, and those before ours, in
which rows of most sizes are captured. First and timed steps have the same documents on all sides (`documents_of`)."""
LARGE = ("qwen3-8b", "qwen3-14b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-9b")
REGIONS = {"BACKEND": "INDUCTOR", "USE_REGIONAL_COMPILATION": "true"}
FSDP = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")


@contextlib.contextmanager
def with_flash_attn_4(trainer: Any) -> Iterator[None]:
    """Give TRL's model transformers' own interface of FlashAttention-4."""
    trainer.model.set_attn_implementation("flash_attention_4")
    yield


@contextlib.contextmanager
def packed(trainer: Any, implementation: str) -> Iterator[str]:
    """Run TRL's trainer with the collator and the packed attention of this package."""
    from fastpack_trl.attention.install import packed_attention
    from fastpack_trl.packing.collator import PackingCollator

    trainer.data_collator = PackingCollator(pad_token_id=PAD)
    with packed_attention(trainer.model, implementation, compute_dtype=torch.bfloat16) as attention:
        yield attention.path


@contextlib.contextmanager
def experts_by(trainer: Any, name: str) -> Iterator[None]:
    """Run the experts of TRL's trainer by another implementation of transformers."""
    register_sorted_loop()
    trainer.model.get_base_model().set_experts_implementation(name)
    yield


@dataclass(frozen=True, slots=True)
class Side:
    """One trainer: fields of its configuration, and the context around its training."""

    ours: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
    warm_caches: bool = False


@dataclass(kw_only=True, eq=False)
class Windows(Watch):
    """Time windows of steps: after the warm-up only the last step of each logs, and waits for the device.

    Attributes:
        window: steps of a window.
        most: largest number of windows, where `timed` of them take less than `LEAST_SECONDS`.
    """

    window: int
    most: int = 0
    _inside: int = field(init=False, default=0)
    _fastest: float = field(init=False, default=math.inf)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the time of a step."""
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step; the log of one inside a window is left out."""
        is_timed = self.result.warmup_steps and len(self.result.seconds) < self.timed
        self._inside = (self._inside + 1) % self.window if is_timed else 0
        if self._inside:
            control.should_log = False
            return
        super().on_step_end(args, state, control, **kwargs)
        if not self.result.warmup_steps:
            self._fastest = min(self._fastest, self._end - self._begin)
            wanted = LEAST_SECONDS / (self._fastest * self.window)
            self.timed = max(self.timed, min(self.most, math.ceil(wanted)))


SAME_MEMORY, OFFLOAD = {"activation_memory": "checkpoint"}, {"activation_memory": "offload"}
SIDES = {
    "trl": Side(),
    "trl compiled": Side(around=compiled_regions),
    "trl flash-attn-4": Side(around=with_flash_attn_4),
    "trl flash-linear-attention": Side(),
    "trl liger": Side(fields={"use_liger_kernel": True}),
    REFERENCE: Side(fields={"bf16": False, "tf32": False}),
    "trl offload": Side(fields={"activation_offloading": True}),
    "fastpack same memory": Side(True, SAME_MEMORY),
    "fastpack same memory eager": Side(True, SAME_MEMORY | {"cuda_graph": "off"}),
    "fastpack warm caches": Side(True, warm_caches=True),
    "fastpack eager": Side(True, {"cuda_graph": "off"}),
    "fastpack fp8": Side(True, {"frozen_base": "fp8"}),
    "fastpack sdpa": Side(True, {"packed_attention": "sdpa"}),
    "fastpack padded": Side(True, {"vision_rows": "off"}),
    "fastpack image rows": Side(True, {"image_row_tokens": 8192, "per_device_train_batch_size": 1}),
    "fastpack whole documents": Side(True, {"share_prefixes": "off"}),
    "fastpack flash-attn-4": Side(True, {"packed_attention": "flash_attention_4"}),
    "fastpack flash-linear-attention": Side(True),
    "fastpack": Side(True),
    "metadata per layer": Side(around=metadata_per_layer),
    "metadata once": Side(around=partial(packed, implementation="sdpa")),
    "packed kernel": Side(around=partial(packed, implementation="auto")),
    "fastpack one buffer": Side(True, OFFLOAD | {"checkpoint_offload": "single_buffer"}),
    "fastpack two buffers": Side(True, OFFLOAD | {"checkpoint_offload": "double_buffer"}),
    "expert by expert": Side(around=partial(experts_by, name="eager")),
    "one sort": Side(around=partial(experts_by, name=ONE_SORT)),
}
"""The sides of the three published optimizations differ in that optimization alone."""


def train(
    row: Mapping[str, Any], side: str, *, seed: int, steps: int, threads: int, profiled: int = 3, profile: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Train one side of a row in this process; return its figures.

    Args:
        profiled: steps under the profiler, after the timed ones.
        profile: file for the table of the kernels of a step.
    """
    what, how = ROWS[row["row"]], SIDES[side]
    if "tokens" in row:
        what = what.stretched_to(row["tokens"], row.get("cap", 0.0))
    what = replace(what, accumulated=row.get("accumulated", what.accumulated))
    if what.engine and how.around is compiled_regions:  # FSDP 2 wraps the model elsewhere
        how = Side()
        os.environ |= {f"ACCELERATE_DYNAMO_{name}": value for name, value in REGIONS.items()}
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "LOCAL_RANK" in os.environ and device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    more: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        fields = {**what.arguments(device), **how.fields, "output_dir": folder, "seed": seed}

        def build() -> Any:
            trainer = make_trainer(what, how.ours, fields, seed)
            if device == "cuda":
                more["weights_gib"] = torch.cuda.memory_allocated() / 2**30
            return trainer

        around = learner_alone if what.is_online else how.around
        watch = replace(watch_of(what, steps, how.ours), profiled=profiled, kernels=profile)
        result = run_side(build, watch, around=around, seed=seed)
    more |= {library.replace("-", "_"): version(library) for library in FOLDERS if library in side}
    more |= {"ooms": torch.cuda.memory_stats().get("num_ooms")} if what.cap and device == "cuda" else {}
    return figures(result, what, watch.window) | more


def make_trainer(row: Row, ours: bool, fields: Mapping[str, Any], seed: int) -> Any:
    """Return TRL's trainer of a row, or ours."""
    import trl

    import fastpack_trl

    name = METHODS[row.method]
    kind, config = (
        getattr(fastpack_trl if ours else trl, f"{'Fast' * ours}{name}{what}") for what in ("Trainer", "Config")
    )
    args = config(**fields)
    material = row.material(args.device.type, seed)
    if args.device.type == "cuda" and not args.bf16:  # weights as those of other sides, with more digits
        material["model"].float()
    if row.case == "images" and "image_row_tokens" not in fields:
        material["train_dataset"] = documents_of(material["train_dataset"], row, ours)
    return kind(args=args, **material)


def documents_of(data: Any, row: Row, ours: bool) -> Any:
    """Return the documents of a side's steps: those of ours, without those of the steps that TRL's warm-up lacks."""
    batch = (row.batch or (1, 1))[0]
    longest, warmup = (watch_of(row, IMAGE_STEPS, each).warmup * batch for each in (True, ours))
    order = [*range(warmup), *range(longest, longest + 10 * IMAGE_STEPS * batch)]
    return data.select([index % len(data) for index in order])


def watch_of(row: Row, steps: int, ours: bool = True) -> Windows:
    """Return the watch of a run: all steps of a whole run, or `steps` after those that decide and settle."""
    if row.run:
        first = row.run // 2
        return Windows(warmup=first, timed=row.run - first, longest_warmup=0, window=1)
    if row.cap or not torch.cuda.is_available():
        return Windows(warmup=2, timed=steps, settling=int(row.cap > 0), window=1)
    if row.case == "images":
        warmup = IMAGE_WARMUP if ours else IMAGE_STEPS
        return Windows(warmup=warmup, timed=max(1, steps // 4), longest_warmup=warmup, window=4)
    window = max(1, min(WINDOW, steps // 4))
    warmup = COMPARED if window > 1 else 6
    most = 0 if window == 1 or row.engine else (RUN - LONGEST_WARMUP) // window - 1  # ranks stop at one step
    return Windows(warmup=warmup, timed=steps // window, settling=SETTLING, window=window, most=most)


def figures(result: Any, row: Row, window: int) -> dict[str, Any]:
    """Return what a record has of a run: the mean seconds per step of each window, losses that are compared.

    All losses, where each step is timed by itself.
    """
    found = asdict(result)
    first = min(COMPARED, found["warmup_steps"]) if window > 1 else None
    warmup = {"steps": found["warmup_steps"], "first": found["first_step_seconds"], "seconds": found["warmup_seconds"]}
    by_step = {
        name: {str(step): short(one, digits) for step, one in enumerate(found[name][:first], 1)}
        for name, digits in {"losses": 7, "grad_norms": 4}.items()
    }
    known = found["report"]
    report = known and {name: "{status}: {path}; {reason}".format(**one) for name, one in known["features"].items()}
    report = report and report | {name: fact for name, fact in known["facts"].items() if name == "image rows"}
    return {
        "layers": row.depth, "run": row.run or RUN, "steps": window * len(found["seconds"]), "warmup": warmup,
        **by_step, "seconds": [short(seconds / window) for seconds in found["seconds"]], "window": window,
        **{name: found[name] for name in ("tokens", "profile")}, "peak_gib": found["reserved_gib"],
        "report": report,
    }  # fmt: skip


def launcher(row: Row, side: str, args: Namespace, caches: str, **more: Any) -> OwnProcess:
    """Return what starts the process of a run, or those of all ranks, with the compile caches in a folder."""
    function = "benchmarks.run:train"
    found = process_command(function, row.engine, args.processes) if row.engine else OwnProcess(function)
    environment = {**found.environment, TEXTS: str(Path(caches).parent)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    folders = [
        os.environ[variable] for library, variable in FOLDERS.items() if library in side and variable in os.environ
    ]
    environment |= {"PYTHONPATH": os.pathsep.join([*sys.path, *folders])} if folders else {}
    options = {"seed": args.seed, "threads": args.threads, **more}
    return replace(found, options=options, timeout=args.timeout, environment=environment)


def process_command(function: str, engine: str, processes: int, *flags: str) -> OwnProcess:
    """Return what calls a function in several processes under ``ddp`` or ``fsdp2``."""
    if torch.cuda.is_available():
        ddp = ("--multi_gpu",) if processes > 1 else ()
        flags = (*(FSDP if engine == "fsdp2" else ddp), "--mixed_precision", "bf16", *flags)
        flags = (*flags, "--num_processes", str(processes), "--main_process_port", "0")  # any free port
        return OwnProcess(function, command=[sys.executable, "-m", "accelerate.commands.launch", *flags])
    if engine != "ddp":
        raise UserError(f"{engine} needs CUDA devices: accelerate starts it on no CPU")
    environment = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    # `accelerate launch` starts one process on a CPU.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return OwnProcess(function, command=torchrun, environment=environment)


def steps_of(row: Row, asked: int | None) -> int:
    """Return the number of timed steps."""
    on_gpu = IMAGE_STEPS if row.case == "images" else 24 if row.model in LARGE else 60
    return asked or (on_gpu if torch.cuda.is_available() else 6)


def measure(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of each run: sides in turn, in the other order in every second round.

    Raises:
        UserError: the file has records of another machine: sides are compared on one machine only.
    """
    done = read(args.json) if args.json is not None and args.json.exists() else []
    about = facts_of(args, done)
    if any(run["machine"] != about["machine"] for run in done):
        raise UserError(
            f"--json {str(args.json)!r} has records of another machine, driver or --threads: give a new file"
        )
    known = {
        (run["row"], run["side"], run["round"]) for run in done if run["tree"] == about["tree"] and "failed" not in run
    }
    special = {"processes": args.processes} if args.launcher == "accelerate" else {}
    special |= {"seed": args.seed} if args.seed else {}
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        for name in args.rows:
            row, caches = ROWS[name], ""
            for number in range(args.rounds):
                sides = args.sides or row.sides
                for side in sides if number % 2 == 0 else sides[::-1]:
                    if (name, side, number) in known:
                        continue
                    if not (caches and SIDES[side].warm_caches):  # else those of the run before
                        caches = tempfile.mkdtemp(dir=folder)
                    # Of one step on images TRL's profile has half a million events, which take minutes to read.
                    looks = number == 0 and (row.case != "images" or SIDES[side].ours)
                    options = {"steps": steps_of(row, args.steps), "profiled": int(looks or args.profile)}
                    start = partial(launcher, row, side, args, caches, **options)
                    found = run_once(name, side, args, start)
                    yield {"case": row.case, "row": name, "side": side, "round": number, **special, **found, **about}


def run_once(name: str, side: str, args: Namespace, start: Callable[..., OwnProcess]) -> dict[str, Any]:
    """Run one side; print the kernels of a step if they were asked for."""
    if not args.profile:
        return start()({"row": name}, side)
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        found = start(profile=file.name)({"row": name}, side)
        print(f"{name}, {side}: kernels of a step\n{Path(file.name).read_text(encoding='utf-8')}")
        return found


def parse(words: Sequence[str]) -> Namespace:
    """Return the options.

    Raises:
        UserError: an unknown row or side; rows of several processes in one, or the reverse.
    """
    parser = Parser("run", __doc__, f"rows: {', '.join(ROWS)}\n\nsides: {', '.join(SIDES)}")
    add = parser.add_argument
    add("--rows", nargs="+", required=True, metavar="ROW", help="names of rows (below), or how they begin")
    add("--sides", nargs="+", metavar="SIDE", help="default: those of the row")
    add("--rounds", type=int, default=2, help="runs of each side (default: %(default)s)")
    add("--launcher", choices=("process", "accelerate"), default="process", help="one process, or one per GPU")
    add("--processes", type=int, default=2, help="of --launcher accelerate (default: %(default)s)")
    add("--steps", type=int, help="least timed steps (default: 60, 24 from 8B on, 6 on a CPU)")
    add("--timeout", type=float, default=900, help="seconds of one run (default: %(default)s)")
    add("--profile", action="store_true", help="print the kernels of a step by their time")
    args = parser.measurement(words, threads=min(8, torch.get_num_threads()))
    args.rows = known_names("row", args.rows, ROWS)
    args.sides = known_names("side", args.sides, SIDES) if args.sides else None
    for name in args.rows:
        if (args.launcher == "accelerate") != bool(ROWS[name].engine):
            raise UserError(f"--launcher {args.launcher} does not fit {name!r}: rows of ddp and fsdp2 need accelerate")
        if REFERENCE in (args.sides or ()) and (ROWS[name].kind != "full" or ROWS[name].engine):
            raise UserError(f"side {REFERENCE!r} does not fit {name!r}: it trains all weights, in one process")
    return args


def main(words: Sequence[str]) -> int:
    """Measure, and print the table of each row; 1 if a run failed."""
    args = parse(words)
    records: list[dict[str, Any]] = []
    for run in measure(args):
        records.append(run)
        append(args.json, run)
        done = f"{1e3 * fmean(run['seconds']):,.1f} ms a step" if "failed" not in run else run["failed"]
        last = "\n".join(run.get("last_lines", ())[-15:])
        print(f"{run['row']}, {run['side']}: {'failed: ' * ('failed' in run)}{done}", last, file=sys.stderr)
    print(shown(records))
    return int(any("failed" in run for run in records))
