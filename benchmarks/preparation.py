"""Preparation of a data set: `FastSFTTrainer` beside `SFTTrainer`, from text to packed or cut rows, on the CPU.

Documents are pieces of the standard library, the tokenizer is trained on it, conversations have the template of Qwen3
that TRL marks for training. Both sides prepare the same data set, read from Arrow's file, without the cache of
`datasets`, in turns in one process; the rows of the first round are compared.
"""

from __future__ import annotations

import random
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_training_chat_template

from benchmarks.cases import loaded_turns
from benchmarks.command import CaseCommand
from benchmarks.readme_cells import ratio_cell
from fastpack_trl import FastSFTTrainer
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.intervals import summary
from fastpack_trl.quickstart.corpus import source_files, stdlib_folder
from fastpack_trl.quickstart.small_model import train_tokenizer

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text", {"packing": True}),
    "text, not packed": ("text", {"packing": False}),
    "prompt-completion": ("pairs", {"packing": True}),
    "conversations, assistant's tokens": ("conversations", {"packing": True, "assistant_only_loss": True}),
    "conversations": ("conversations", {"packing": True}),
}
VOCABULARY = 32_000
MAX_LENGTH = 2048
SIDES = ("stock", "fastpack")
_CHARACTERS = {"text": (200, 1800), "pairs": (100, 900), "question": (20, 300), "answer": (50, 500)}
_MOST_TURNS = 4


@cache
def _texts() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in source_files(stdlib_folder()))


@cache
def tokenizer() -> Any:
    """Return a byte-level BPE of `VOCABULARY` tokens, with Qwen3's template."""
    made = train_tokenizer(_texts()[::3], vocabulary=VOCABULARY, progress=False)
    made.chat_template = qwen3_training_chat_template
    return made


def documents(kind: str, count: int, seed: int) -> Dataset:
    """Return `count` rows of text, of pairs or of conversations of up to four turns."""
    draw = random.Random(seed)
    texts = [text for text in _texts() if len(text) > _CHARACTERS["text"][1]]

    def piece(of: str) -> str:
        length, text = draw.randint(*_CHARACTERS[of]), draw.choice(texts)
        start = draw.randrange(len(text) - length)
        return text[start : start + length]

    def turns() -> list[dict[str, str]]:
        pairs = [(piece("question"), piece("answer")) for _ in range(draw.randint(1, _MOST_TURNS))]
        said = (({"role": "user", "content": a}, {"role": "assistant", "content": b}) for a, b in pairs)
        return [message for pair in said for message in pair]

    make: dict[str, Callable[[], dict[str, Any]]] = {
        "text": lambda: {"text": piece("text")},
        "pairs": lambda: {"prompt": piece("pairs"), "completion": piece("pairs")},
        "conversations": lambda: {"messages": turns()},
    }
    return Dataset.from_list([make[kind]() for _ in range(count)])


def measure(name: str, seconds: float, *, count: int, rounds: int, seed: int, processes: int | None) -> dict[str, Any]:
    """Return the seconds of both sides, and that their rows are equal."""
    kind, options = ROWS[name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(quiet())
        documents(kind, count, seed).save_to_disk(folder / "data")
        rows = datasets.load_from_disk(folder / "data")
        if datasets.is_caching_enabled():
            datasets.disable_caching()
            stack.callback(datasets.enable_caching)
        args = SFTConfig(
            str(folder / "out"), max_length=MAX_LENGTH, dataset_num_proc=processes, report_to="none", bf16=False,
            use_cpu=True, **options,
        )  # fmt: skip
        trainer = _trainer(args, rows.select(range(2)))

        def prepare(side: str) -> Dataset:
            of: Any = SFTTrainer._prepare_dataset if side == "stock" else FastSFTTrainer._prepare_dataset
            trainer.fastpack_run.facts = None
            done: Dataset = of(trainer, rows, trainer.processing_class, args, args.packing, None, "train")
            return done

        theirs, ours = (prepare(side) for side in SIDES)
        facts = trainer.fastpack_run.facts
        assert facts is not None
        equal = ours.features == theirs.features
        equal = equal and ours.with_format("arrow")[:].equals(theirs.with_format("arrow")[:])
        calls = {side: partial(prepare, side) for side in SIDES}
        found, load = loaded_turns(calls, "cpu", rounds=rounds, warmup=0, seconds=seconds, loud=FAILURES)
    return {
        "documents": count, "tokens": facts.tokens, "equal": bool(equal), "passed": bool(equal),
        "row_by_row": facts.row_by_row,
        "sides": {side: {"seconds": summary(found.seconds[side])} for side in SIDES},
        "ratio": found.ratio(*SIDES), "other_load": load,
    }  # fmt: skip


def _trainer(args: SFTConfig, rows: Dataset) -> FastSFTTrainer:
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer()), **sizes))
    return FastSFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer())


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows, each measured in this process and said when it is: a row of 50,000 documents takes minutes."""
    options = {"count": args.documents, "rounds": args.rounds, "seed": args.seed, "processes": args.processes}

    def say(name: str, seconds: float) -> dict[str, Any]:
        print(f"{name}: {args.documents:,} documents ...", file=sys.stderr, flush=True)
        row = measure(name, seconds, **options)
        print(_line({"setting": name, **row}), file=sys.stderr, flush=True)
        return row

    return [RowTask({"setting": name}, partial(say, name)) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return how much is prepared."""
    return {
        "documents": args.documents, "processes": args.processes, "rounds": args.rounds, "vocabulary": VOCABULARY,
        "max_length": MAX_LENGTH,
    }  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Return a line per row: tokens per second of both sides, and by how much ours is faster."""
    return "\n".join(map(_line, record["rows"]))


def _line(row: Mapping[str, Any]) -> str:
    if not row["sides"]:
        return f"{row['setting']:36} {row.get('skipped')}"
    times = {side: row["sides"][side]["seconds"]["median"] for side in SIDES}
    each = ", ".join(f"{side} {time:.1f} s ({row['tokens'] / time:,.0f} tokens/s)" for side, time in times.items())
    same = "equal rows" if row["equal"] else "OTHER ROWS"
    return f"{row['setting']:36} {each}, {ratio_cell(row['ratio'])} times, {same}"


def add_options(parser: ArgumentParser) -> None:
    """Add how many documents, and the processes of both sides."""
    parser.add_argument("--documents", metavar="N", type=int, default=50_000)
    parser.add_argument("--processes", metavar="N", type=int, help="dataset_num_proc of both (default: none)")


COMMAND = CaseCommand(
    case="preparation", help=__doc__, rows=ROWS, rounds=3, tasks=tasks, settings=settings, table=table,
    more=add_options,
)  # fmt: skip

main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
