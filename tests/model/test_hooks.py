"""Module hooks of the user are found by name, and hidden as a whole; `tests/test_users_hooks.py` trains with them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hook_material import REGISTER, REGISTER_GLOBAL
from torch import nn
from torch.utils.module_tracker import ModuleTracker
from trainer_material import assert_same_log, build
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.hooks import HookWatch, PartsHooked, hook_inside, is_users, users_hooks_off
from fastpack_trl.testing import tiny_model


def nothing(*_args: Any) -> None:
    return None


class Callback:
    def __call__(self, *_args: Any) -> None:
        return None


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.SiLU()))


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_inside_is_found_by_name_and_forgotten_when_it_goes(kind: str) -> None:
    model = network()
    watch, hooked, on_part = HookWatch(model), PartsHooked(), partial(REGISTER[kind], model[1][0])
    for register, hook, expected in (
        (on_part, nothing, f"the {kind} nothing on 1.0"),
        (on_part, partial(nothing, 1), f"the {kind} nothing on 1.0"),
        (REGISTER_GLOBAL[kind], Callback(), f"the global {kind} Callback"),
    ):
        assert (watch.look(), hooked(model[0], model[1][0])) == ("", False)
        with register(hook):
            assert (watch.look(), hooked(model[0], model[1][0])) == (expected, True)
    assert (watch.look(), hooked(model[0], model[1][0])) == ("", False)
    model[0].forward = nothing
    assert hooked(*model)


def test_hooks_that_libraries_need_are_not_the_users() -> None:
    model = tiny_model("qwen3")
    model(input_ids=torch.arange(5)[None], output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())  # transformers leaves them there
    model.enable_input_require_grads()
    nn.utils.weight_norm(model.lm_head)
    with ModuleTracker():
        assert hook_inside(model) == ""


def test_users_hooks_see_nothing_while_they_are_off_and_are_there_again_in_their_order() -> None:
    model, seen = network(), list[str]()

    def note(name: str) -> Any:
        return lambda *_args: seen.append(name)

    def run() -> list[str]:
        seen.clear()
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return list(seen)

    handles = [register(model[0], note(f"own {kind}")) for kind, register in REGISTER.items()]
    handles += [register(note(f"global {kind}")) for kind, register in REGISTER_GLOBAL.items()]
    gone = model[0].register_forward_hook(note("gone"))
    try:
        before = run()
        with suppress(KeyboardInterrupt), users_hooks_off(model):
            assert run() == []
            gone.remove()
            handles.append(model[0].register_forward_hook(note("new")))
            raise KeyboardInterrupt
        after = run()
    finally:
        for handle in handles:
            handle.remove()
    assert after == ["new" if name == "gone" else name for name in before] != before
    assert run() == []


def clamped(own: Any) -> Any:
    """A wrapper of the user that has the name and the module of TRL's method."""

    @wraps(own)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs).clamp(max=2.25)

    return compute_loss


def test_a_wrapper_with_the_name_of_a_librarys_method_is_the_users() -> None:
    own, no_grad = SFTTrainer.compute_loss, torch.no_grad()
    users = (
        (wrapper := clamped(own)),
        MethodType(wrapper, object()),
        partial(wrapper),
        no_grad(wrapper),
        wraps(own)(nothing),
    )
    assert [is_users(each) for each in users] == [True] * len(users)
    assert not any(map(is_users, (own, MethodType(own, object()), partial(own), no_grad(own), SFTTrainer)))


@pytest.mark.parametrize("of_class", [False, True])
def test_a_wrapped_loss_sees_each_micro_batch(of_class: bool, tmp_path: Path) -> None:
    sides = []
    for number, kind in enumerate((FastSFTTrainer, SFTTrainer)):
        mine = type("Mine", (kind,), {"compute_loss": clamped(kind.compute_loss)}) if of_class else kind
        options = {"packing": True, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
        trainer = build(mine, tmp_path / str(number), **options)
        if not of_class:
            trainer.compute_loss = clamped(trainer.compute_loss)
        trainer.train()
        sides.append(trainer)
    assert "compute_loss" in sides[0].fastpack_report["merge_accumulation"].reason
    assert_same_log(*sides)
