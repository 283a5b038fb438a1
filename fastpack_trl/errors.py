"""Errors for the user: one line with the value and the fix. All other errors keep their traceback."""

from __future__ import annotations

import argparse
import re
import reprlib
import shlex
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

_MAX_LENGTH = 600  # some upstream messages list every model class; --traceback shows all of it
_SHORTEST_PART, _MOST_NAMES = 3, 6  # characters of a part that names are looked up by; names of one suggestion
_MAX_SHOWN = 200  # of a value, so that the rest of the message still fits
# Line breaks, what a terminal obeys, marks that reverse text, and what YAML or UTF-8 cannot hold.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]")
_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "pad_to_multiple_of"),
    *("per_device_eval_batch_size", "eval_accumulation_steps"),
)
_SECRET = re.compile(
    r"(.+_)?(api_?key|passw(or)?d|secret(_access)?(_key)?|private_key|credentials?)"
    r"|((push_to_)?hub_|hf_|hugging_?face_(hub_)?|github_|(use_)?auth_|access_|bearer_)?token"
)


class UserError(ValueError):
    """A setting, file or model that the user must change. The command line prints it as one line, with exit code 2."""


class DataError(ValueError):
    """Examples that cannot be trained on; names the data set, the example and the fix."""


class PackingError(RuntimeError):
    """Packed documents affect each other, or the metadata that separates them is missing."""


class TerminatedError(KeyboardInterrupt):
    """Training ended after SIGTERM; says what was saved and how to resume. Libraries let it pass as they do Ctrl-C."""


class RankFailedError(Exception):
    """One of several processes failed in a joint operation; the launcher ends the others."""


SETTING_ERRORS = (ValueError, ImportError, OSError, KeyError, PackingError)
"""Errors that transformers, datasets, accelerate, peft and the packing check raise for a wrong setting."""


def first_reason(reasons: Iterable[object]) -> str:
    """Return the first non-empty reason, or ``""``; later ones are not evaluated.

    ``first_reason(why_not(run))`` of a generator with lines such as ``yield args.fp16 and f"scaler {args.fp16}"``: a
    condition costs nothing after one that holds, and a text is formatted only if its condition holds.
    """
    return next((reason for reason in reasons if isinstance(reason, str) and reason), "")


def is_secret(key: object) -> bool:
    """Return whether a key names a secret, by the whole key: ``HF_TOKEN``, ``wandb_api_key``, but not ``eos_token``."""
    return _SECRET.fullmatch(str(key).lower().replace("-", "_")) is not None


class _Short(reprlib.Repr):
    """A repr of a bounded part of a value, without secrets: lists that contain each other can be endless."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 3, 6, _MAX_SHOWN, _MAX_SHOWN

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict({key: ... if is_secret(key) else value for key, value in x.items()}, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python prints at most a few thousand digits
            return f"a number of {x.bit_length()} bits"


def short_repr(value: object) -> str:
    """Return the repr of a user's value for a message, bounded in time and length: ``[[1, 2, 3, 4, 5, 6, ...]]``."""
    text = _Short().repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


class NonFiniteError(ValueError):
    """The model's own outputs are NaN or infinite, so the packing check is impossible; names the parameter."""


def printable(text: object) -> str:
    """Return the text with line breaks and control characters as escapes, so that it is one line everywhere."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def one_line(message: object) -> str:
    """Return the message as one printable line without colors, cut after 600 characters."""
    text = printable(" ".join(re.sub(r"\x1b\[[\d;]*m", "", str(message)).split()))
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}... (--traceback shows all of it)"


def command_line(*words: object) -> str:
    """Return a command of this program for a shell, secrets as dots: ``fastpack-trl sft --hub_token ... --seed 1``."""
    texts = ["fastpack-trl", *map(str, words)]
    for index, (word, after) in enumerate(pairwise([*texts, ""])):
        name, equals, _ = word.lstrip("-").partition("=")
        if any(map(is_secret, re.findall(r'"([\w-]+)" *:', word))) or (is_secret(name) and equals):
            texts[index] = f"{word.partition('=')[0]}=..." if equals else "..."
        elif is_secret(name) and word.startswith("--") and after and not after.startswith("--"):
            texts[index + 1] = "..."
    return shlex.join(texts)


def _causes(error: BaseException | None) -> list[BaseException]:
    """Return a caught exception and its causes."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def close_frames(error: BaseException) -> None:
    """Clear the local variables in the frames of a caught exception and of its causes.

    In torch 2.11 a checkpoint whose layer raised keeps its saved-tensor hooks until its generator dies. The garbage
    collector may do that late and in a thread of autograd, which has its own hooks: these then remain, and every later
    checkpoint counts too many tensors.
    """
    for each in _causes(error):
        traceback.clear_frames(each.__traceback__)


def first_cause(error: BaseException) -> BaseException:
    """Return the exception in whose handling the others were raised: leaving a context may fail because of it."""
    return _causes(error)[-1]


def describe(error: BaseException) -> str:
    """Return the message of `error` and its notes as one line; its class name if it has none."""
    # str(KeyError("text")) is the repr of the text, quotes and escapes included.
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    told = one_line(message) or type(error).__name__
    return " ".join([told, *map(one_line, getattr(error, "__notes__", ()))])


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'max_length'?"`` for ``"max_lenght"``; empty if no valid name is near.

    They are the names that begin with it, six at most, else the nearest, else those that contain it.
    """
    text, known = str(name), sorted(set(valid))
    bare = text.lstrip("-")
    parts = {one: one.lstrip("-").find(bare) for one in known if len(bare) >= _SHORTEST_PART and bare in one}
    starts = [one for one, place in parts.items() if place == 0]
    near = [*map(repr, starts or get_close_matches(text, known, n=1) or parts)][:_MOST_NAMES]
    return f"; did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?" if near else ""


def check_counts(args: Any) -> None:
    """Raise `ValueError` for a count below 1; for those of evaluation only if the run evaluates."""
    for name in _COUNTS:
        value = getattr(args, name, None) if "eval" not in name or args.eval_strategy != "no" else None
        if isinstance(value, int | float) and not value >= 1:
            raise ValueError(f"{name}={short_repr(value)} must be >= 1")


def check_name(what: str, name: str, valid: Collection[str], kind: str) -> None:
    """Raise `UserError` for a name that is not valid: ``side 'stok' does not exist; did you mean 'stock'? ...``."""
    if name not in valid:
        raise UserError(f"{what} {name!r} does not exist{did_you_mean(name, valid)} ({kind}: {', '.join(valid)})")


class OneLineParser(argparse.ArgumentParser):
    """Raise `UserError` for a wrong argument: ``sft.yaml: max_length: invalid int value: 'abc'``."""

    source, help_option = "--", "--help"
    """What stands before the name of an option in a message; the option that lists all."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message and the choice that is nearest to a wrong one."""
        text = re.sub(r"^argument --([\w-]+)\S*: ", lambda match: f"{self.source}{match[1]}: ", message)
        for kind, number in (("int", "a whole number"), ("float", "a number")):
            text = re.sub(rf": invalid {kind} value: ('.*')", rf"=\1 must be {number}", text)
        if choices := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", text):
            near = did_you_mean(choices[1], re.findall(r"[\w.-]+", choices[2]))
            text = text.replace(" (choose", f"{near} (choose")
        raise UserError(f"{text} (see `{self.prog} {self.help_option}`)")


def _is_bug(error: BaseException) -> bool:
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == "fastpack_trl"
    # KeyError("loss") is a bug in code; KeyError("Unexpected input keys in examples: ...") is a message to the user.
    return isinstance(error, KeyError) and " " not in str(error.args[0] if error.args else "")


@contextmanager
def naming_keys(settings: Mapping[str, object]) -> Iterator[None]:
    """Name the setting that has an unexpected keyword argument: ``{"lr_scheduler_kwargs": {"fo": 1}}``.

    A call that got one of the mappings raises `UserError` in place of its `TypeError`.
    """
    try:
        yield
    except TypeError as error:
        for name, value in settings.items():
            for key in value if isinstance(value, Mapping) else ():
                if f"unexpected keyword argument '{key}'" in str(error):
                    raise UserError(f"{name}: unknown key {key!r}: {describe(error)}") from error
        raise


@contextmanager
def preparing(
    finished: Callable[[], bool] = bool, what: str = "", remedy: str = "if a file is damaged, copy or download it again"
) -> Iterator[None]:
    """Convert the libraries' `SETTING_ERRORS` into a `UserError` of one line while a run is prepared.

    Args:
        finished: called when an error arrives; if it returns True, the error passes unchanged. For a call that both
            prepares and trains.
        what: files that are loaded, ``"the adapter 'out'"``: damaged ones may raise anything, which is converted too.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if what and "Memory" not in type(error).__name__:
            fix = "" if isinstance(error, ImportError) else f": {remedy}"
            raise UserError(f"{what} cannot be loaded ({type(error).__name__}: {describe(error)}){fix}") from error
        if not isinstance(error, SETTING_ERRORS) or finished() or _is_bug(error):
            raise
        raise UserError(describe(error)) from error
