"""Values in messages are short; an exception inside of a checkpoint leaves no saved-tensor hook behind."""

from __future__ import annotations

import shlex
import time
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastpack_trl.errors import close_frames, command_line, describe, short_repr


@pytest.mark.parametrize("error", [ValueError("no image"), KeyError("no image")])
def test_notes_of_an_error_are_told(error: Exception) -> None:
    assert describe(error) == "no image"
    error.add_note("in row 7\nof the data set")
    assert describe(error) == "no image in row 7 of the data set"


@pytest.mark.parametrize("causes", [False, True])
def test_hooks_are_gone_when_the_exception_is_still_held(causes: bool) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    kept: list[BaseException] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        local = torch.ones(2)
        held.append(weakref.ref(local))
        raise RuntimeError(f"no memory for {x.shape}")

    try:
        try:
            checkpoint(fail, torch.ones(2, requires_grad=True), use_reentrant=False)
        except RuntimeError as error:
            if not causes:
                raise
            raise ValueError("cannot compile") from error
    except (RuntimeError, ValueError) as error:
        kept.append(error)  # as a cycle would, until the collector runs
    assert held[-1]() is not None
    close_frames(kept[0])
    assert held[-1]() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "it would count tensors of others"


def aliased(levels: int) -> Any:
    return [aliased(levels - 1)] * 10 if levels else ["x"]


@pytest.mark.parametrize("value", [aliased(12), {"a": aliased(12)}, "x" * 10**6, 2**10**6, {"z" * 10**6: 1}], ids=type)
def test_what_a_message_shows_of_a_value_is_short_and_quick(value: Any) -> None:
    started = time.monotonic()
    assert 0 < len(short_repr(value)) <= 200
    assert time.monotonic() - started < 1


def test_short_values_are_shown_whole() -> None:
    for value in ("a'b", 5, None, [64], {"a": 1}, (1, "b"), b"x"):
        assert short_repr(value) == repr(value)


@pytest.mark.parametrize(
    "words",
    ["--hub_token hf_x", "--hub-token=hf_x", "--wandb_api_key hf_x", """--model_init_kwargs '{"token": "hf_x"}'"""],
)
def test_a_command_to_repeat_has_no_secret(words: str) -> None:
    said = command_line("sft", *shlex.split(f"--eos_token 'x y' {words} --seed 1"))
    assert said.startswith("fastpack-trl sft --eos_token 'x y' --")
    assert said.endswith("... --seed 1")
    assert "hf_x" not in said
