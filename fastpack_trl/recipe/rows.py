"""Checks before a model is loaded: the split, the columns of its first example, and whether a tokenizer fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastpack_trl.errors import DataError, UserError, short_repr
from fastpack_trl.recipe.columns import (
    CONVERSATIONS,
    LABEL,
    MESSAGES,
    TEXT,
    TOKENS,
    check_cells,
    check_row,
    is_list_of,
)
from fastpack_trl.recipe.formats import AS_IS, format_of
from fastpack_trl.recipe.methods import METHODS, SFT, Method, made_for


def take_split(splits: Mapping[str, Any], name: str, field: str, why: str = "") -> Any:
    """Return the split `name`, which `field` has chosen and `why` says who needs, once it is there and has rows."""
    if name not in splits:
        raise UserError(
            f"{field}={short_repr(name)}{why}: the data has no such split; it has: {', '.join(splits)}. Set {field} to "
            "one of them" + (", or eval_strategy to 'no'" if why else "")
        )
    split = splits[name]
    if next(iter(split), None) is None:
        raise UserError(f"split {name!r} of the data is empty (0 rows): check the file, or choose another with {field}")
    return split


def check_rows(split: Any, name: str, training: Any, processing_class: Any, method: Method = SFT) -> None:
    """Check the first example of the ``train`` or ``eval`` split, and that the tokenizer fits it.

    Raises:
        DataError: columns that the method does not train on, with the command that does; or cells that hold something
            else than they should.
    """
    if method is SFT:
        if (training.dataset_kwargs or {}).get("skip_prepare_dataset"):
            return
        with _naming_the_command(split, name):
            read = check_row(next(iter(split)), training.dataset_text_field, name)
    else:
        read = _read(split, name, method)
    kinds = set(read.values())
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if kinds != {TOKENS}:
        check_vocabulary(tokenizer)
    if kinds & CONVERSATIONS:
        given = getattr(training, "chat_template_path", None)
        if not any((given, processing_class.chat_template, tokenizer.chat_template)):
            remedy = "set chat_template_path to a .jinja file or to a model that has one"
            if not hasattr(training, "chat_template_path"):
                remedy = "save it with one beside the model (tokenizer.chat_template = ...)"
            raise UserError(
                f"the {name} data set holds conversations, but the tokenizer has no chat template: {remedy}"
            )
    elif kinds == {TEXT} and getattr(training, "eos_token", None) is None and tokenizer.eos_token is None:
        raise UserError("the tokenizer has no end-of-sequence token: set eos_token to a token of its vocabulary")


def check_vocabulary(tokenizer: Any) -> None:
    """Check that a tokenizer has tokens: transformers makes an empty one for some families where its files are missing.

    Raises:
        UserError: it has none.
    """
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path!r} gives no tokens for any text (vocabulary of "
            f"{len(tokenizer)}): its files are missing there; save it beside the model"
        )


@contextmanager
def _naming_the_command(split: Any, name: str) -> Iterator[None]:
    """Say which command trains on what SFT does not."""
    try:
        yield
    except DataError as error:
        row = next(iter(split))
        if (found := format_of(row)) != AS_IS:
            raise DataError(
                f"{error}; these are {found.title()}'s columns: dataset_format: {found} reads them"
            ) from error
        columns = list(row)
        command = made_for(columns)
        if command in ("", SFT.command):
            raise
        raise DataError(_made_for_another(columns, name, command)) from error


def _made_for_another(columns: Sequence[str], name: str, command: str) -> str:
    return (
        f"the {name} data set has the columns {', '.join(columns)}, which are for {METHODS[command].what}: "
        f"`fastpack-trl {command}` trains on them"
    )


def _read(split: Any, name: str, method: Method) -> dict[str, str]:
    """Return what each column has to hold that the trainer of `method` reads, once the first row holds that.

    ``{"prompt": "text", "chosen": "text", "rejected": "text"}``

    Raises:
        DataError: other columns, or other values in the first row.
    """
    row = next(iter(split))
    needed = next((names for names in method.columns if set(names) <= set(row)), None)
    if needed is None:
        command = made_for(row)
        if command and command != method.command:
            raise DataError(f"{_made_for_another(list(row), name, command)}; {method.command} needs {method.needs}")
        raise DataError(
            f"the {name} data set has the columns {', '.join(row)}: {method.command} needs {method.needs}; rename them"
        )
    names = dict.fromkeys([*(["prompt"] if "prompt" in row else []), *needed])
    if isinstance(row.get("prompt"), str) and is_list_of(row.get("chosen"), "role"):
        raise DataError(
            f"the {name} data set has text in 'prompt' and messages in 'chosen': provide messages in both; where "
            "'chosen' begins with the prompt, leave that column out: `datasets: [{path: ..., columns: [chosen, "
            "rejected]}]`"
        )
    turns = any(is_list_of(row[column], "role") for column in names)
    of_its_own = {"label": LABEL, "chosen_ids": TOKENS, "rejected_ids": TOKENS}
    read = {column: of_its_own.get(column, MESSAGES if turns else TEXT) for column in names}
    check_cells(row, read, name)
    return read
