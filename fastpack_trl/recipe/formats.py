"""Convert data in the columns of Alpaca and ShareGPT to those that TRL reads: the option ``dataset_format``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastpack_trl.errors import DataError, short_repr

AS_IS, ALPACA, SHAREGPT = FORMATS = "as_is", "alpaca", "sharegpt"
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
_KEPT = {"images", "image", "tools", "chat_template_kwargs"}
"""Columns that TRL reads beside the messages."""
_KEPT_BY = {"kto": {"label"}, "reward": {"margin"}}
_IN_TURNS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
"""What chat templates read of a turn beside its text."""

Row = Mapping[str, Any]


@dataclass
class DataArguments:
    """Options of the data that TRL does not have."""

    dataset_format: str = field(
        default=AS_IS,
        metadata={
            "choices": list(FORMATS),
            "help": "Columns of the data: as_is (those that TRL reads), alpaca (instruction, input, output) or "
            "sharegpt (conversations of from and value), which become messages for the chat template.",
        },
    )


def reshape(split: Any, name: str, wanted: str, command: str = "sft") -> Any:
    """Return a split in the columns that TRL's trainer of this command reads; as it is for ``as_is``.

    - ``alpaca``: ``prompt`` and ``completion``, both messages; ``system`` and ``history`` are part of the prompt.
    - ``sharegpt``: ``messages``; for KTO and online methods, whose answer is the last turn, as ``alpaca``.

    With ``chosen`` and ``rejected``, which may be whole conversations, these and ``prompt``; for online methods no
    answer. Images, tools, options of the template, and what the method reads stay. Raises `DataError` for other
    columns, and for what TRL would silently train otherwise: a row without an answer, a turn of an unknown role or of
    weight 0, videos, ``<image>`` in the text of a row with images.
    """
    if wanted == AS_IS:
        return split
    columns, online = set(next(iter(split))), command in ("grpo", "rloo")
    turns = "messages" if "messages" in columns else "conversations"
    takes_pairs = command in ("dpo", "reward") or (command == "sft" and wanted == SHAREGPT)  # which SFT then refuses
    pairs = takes_pairs and {"chosen", "rejected"} <= columns
    needed = (turns,) if wanted == SHAREGPT else ("instruction",) if online or pairs else ("instruction", "output")
    if lacking := [name for name in needed if name not in columns]:
        data, needs = f"the {name} data set has the columns {', '.join(sorted(columns))}", " and ".join(lacking)
        raise DataError(f"dataset_format={wanted} needs {needs}, but {data}: leave dataset_format out, or rename them")
    lost = set() if online else columns - _KEPT - _KEPT_BY.get(command, set())
    read = _of_alpaca if wanted == ALPACA else partial(_of_sharegpt, column=turns)
    made = _pair if pairs else partial(_columns, wanted=wanted, command=command)
    return split.map(lambda row: _checked(row, made(row, read(row))), remove_columns=[*lost])


def _columns(row: Row, prompt: list[Row], wanted: str, command: str) -> dict[str, Any]:
    """Return a row in the columns of a command."""
    is_answered = prompt[-1]["role"] == "assistant"
    if command in ("grpo", "rloo"):
        return {"prompt": prompt[:-1] if is_answered else prompt}
    if wanted == ALPACA:
        return {"prompt": prompt, "completion": _answer(row["output"])}
    if command == "kto":
        if not is_answered:
            raise DataError(f"{short_repr(prompt)} does not end with an answer: leave such rows out")
        return {"prompt": prompt[:-1], "completion": prompt[-1:]}
    return {"messages": prompt}


def _pair(row: Row, prompt: list[Row]) -> dict[str, Any]:
    """Return the columns of a pair: two answers, or two conversations that differ in the last turn."""
    chosen, rejected = (_answer(row[side]) for side in ("chosen", "rejected"))
    if chosen[0]["role"] != "assistant":
        prompt, *others = chosen[:-1], rejected[:-1]
        chosen, rejected = chosen[-1:], rejected[-1:]
        if others != [prompt]:
            raise DataError(f"{short_repr(others[0])} is not the prompt of `chosen`: they may differ in the last turn")
    turns = (prompt[-1], chosen[-1], rejected[-1]) if prompt else ()
    if [turn["role"] == "assistant" for turn in turns] != [False, True, True]:
        raise DataError(f"{short_repr(turns)} are no prompt and two answers to it: leave such rows out")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _checked(row: Row, made: dict[str, Any]) -> dict[str, Any]:
    if row.get("videos") or row.get("audios"):
        raise DataError("a row has videos or audios, which are not read: leave such rows out")
    if (row.get("images") or row.get("image")) and "<image>" in str(made):
        data = short_repr(made)
        raise DataError(f"{data} holds '<image>' as text: remove it, because TRL puts images before the first turn")
    return made


def _of_alpaca(row: Row) -> list[Row]:
    turns: list[Row] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    request = "\n".join(str(part) for part in (row["instruction"], row.get("input")) if part not in (None, ""))
    for exchange in row.get("history") or ():
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise DataError(f"history has {short_repr(exchange)}, which is no pair of a request and its answer")
        user, assistant = exchange
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return [*turns, {"role": "user", "content": request}]


def _answer(given: Any) -> list[Row]:
    """Return an answer as turns: it is one turn, several, or text."""
    if isinstance(given, Mapping | list):
        return [_message(turn) for turn in _turns(given)]
    if given is None:
        raise DataError("a row has no answer: leave it out")
    return [{"role": "assistant", "content": str(given)}]


def _of_sharegpt(row: Row, column: str) -> list[Row]:
    turns: list[Row] = [_message(turn) for turn in _turns(row[column])]
    is_begun = not row.get("system") or turns[0]["role"] == "system"  # whose text counts
    return turns if is_begun else [{"role": "system", "content": row["system"]}, *turns]


def _turns(given: Any) -> list[Row]:
    turns = [given] if isinstance(given, Mapping) else given
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"a row has {short_repr(given)} instead of turns: drop it")
    return turns


def _message(turn: Row) -> dict[str, Any]:
    name = turn.get("from", turn.get("role"))
    if (role := _ROLES.get(str(name))) is None:
        fix = f"rename it to one of {', '.join(_ROLES)}; calls of functions are `tool_calls` of the assistant"
        raise DataError(f"a turn has the unknown role {short_repr(name)}: {fix}")
    if role == "assistant" and turn.get("weight") == 0:
        raise DataError("a turn has weight 0, which TRL would train: leave such rows out, or end them before that turn")
    more = {key: turn[key] for key in _IN_TURNS if key in turn}  # None too: all rows have the same keys
    return {"role": role, "content": turn["value"] if "value" in turn else turn.get("content"), **more}
