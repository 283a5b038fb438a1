"""Text, tokenizer and model of the first run, offline: ``fastpack-trl init quickstart``, or `make_inputs` in notebooks.

The text is the documentation of the running interpreter's standard library. Its files are parsed; none is imported.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError

FOLDER = Path("quickstart-output")
LENGTHS = range(30, 6_001)
"""Limits of the length of a docstring, in characters."""
LEAST = 500
"""With fewer documents, the interpreter was installed without its sources."""
VOCABULARY, MAX_LENGTH = 4_096, 1_024
EXCLUDED = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"]
)
"""Folders with installed packages, test suites and applications, which are not reference text."""
_QUESTIONS = ("What does `{}` do?", "Explain `{}`.", "What is `{}` for?")
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields of a statement that hold statements, in order
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML. The generation markers enclose the answer and its end-of-turn token: under `assistant_only_loss` the model
# also learns to stop.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{%- if message['role'] == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}{%- else %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_inputs(folder: str | Path = FOLDER, family: str = "qwen3") -> str:
    """Make ``data/`` with the text and ``model/`` with a tokenizer and a small random model; return a line about them.

    Those that exist stay. Raises `UserError` if `folder` has other contents, or Python lacks its library sources.

    Args:
        family: of the model, e.g. ``gpt_oss``, as `fastpack_trl.testing.tiny_model` names it.
    """
    folder = Path(folder)
    if (folder / "model").is_dir() and (folder / "data").is_dir():
        return f"model and data: those in {folder}/"
    if folder.exists():
        raise UserError(f"{folder} exists but was not written by `fastpack-trl init quickstart`: move it away")
    documents = collect()
    tokenizer = train_tokenizer(text for question, answer in documents for text in (question, answer))
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    (partial / "data").mkdir(parents=True)
    rows: dict[str, list[str]] = {"train": [], "test": []}
    for index, (question, answer) in enumerate(documents):  # every 40th document is held out
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows["test" if index % 40 == 39 else "train"].append(json.dumps({"messages": turns}) + "\n")
    for split, lines in rows.items():
        (partial / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    build_model(tokenizer, family).save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    partial.rename(folder)
    return f"made {folder}/: {len(documents):,} docstrings of the standard library and a small model of random weights"


def collect(folder: Path | None = None) -> list[tuple[str, str]]:
    """Return a question and the docstring that answers it for everything documented under `folder`, each text once.

    Default: the standard library of this interpreter. The order is that of files and lines on every machine. Raises
    `UserError` for fewer than a few hundred documents.
    """
    from tqdm.auto import tqdm

    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    answers: dict[str, str] = {}  # keyed by name, so that questions and answers are unique
    seen: set[str] = set()
    for path in tqdm(_source_files(folder), desc="Reading docstrings", unit="file", disable=None):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences in files of the library
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # bad syntax; null bytes or undecodable; unreadable
            continue
        module = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for name, answer in _docstrings(tree, module):
            if name not in answers and answer not in seen and len(answer) in LENGTHS:
                seen.add(answer)
                answers[name] = answer
    if len(answers) < LEAST:
        raise UserError(f"only {len(answers)} docstrings in {folder}: use a Python with its standard library's sources")
    # A checksum of the name, unlike `hash`, is the same in every process.
    kinds = {name: _QUESTIONS[zlib.crc32(name.encode()) % len(_QUESTIONS)] for name in answers}
    return [(kinds[name].format(name), text) for name, text in answers.items()]


def _source_files(folder: Path) -> list[Path]:
    """Return the Python files under `folder` in order, without entering `EXCLUDED` folders."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - EXCLUDED
        found += [Path(place, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield qualified name and cleaned docstring of everything in `node`, in the order of its lines."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        # A lone surrogate is legal in a Python string, and not in UTF-8, the encoding of the data files.
        yield name, (ast.get_docstring(node) or "").encode(errors="ignore").decode()
    for child in (child for block in _BLOCKS for child in getattr(node, block, ())):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _docstrings(child, f"{name}.{child.name}" if named else name)


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Return a `PreTrainedTokenizerFast`, byte-level BPE with a chat template, that can encode every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes: every text can be encoded
        show_progress=sys.stderr.isatty(),  # otherwise it prints empty lines
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=TURN_END, additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # "\n ." in a docstring is text, also when it is decoded
    )  # fmt: skip


def build_model(tokenizer: Any, family: str = "qwen3") -> Any:
    """Return a model of 4 layers with random weights for the tokenizer; the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    more: dict[str, Any] = {}
    if family == "gpt_oss":
        more = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
        more |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": 150_000.0}
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **more,
    )  # fmt: skip
    set_seed(0)
    return AutoModelForCausalLM.from_config(config)
