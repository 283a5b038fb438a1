"""Module hooks of the user run as in TRL, wherever a forward was replaced."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hook_material import REGISTER, REGISTER_GLOBAL
from torch import nn
from torch.utils.module_tracker import ModuleTracker

from fastpack_trl.model import hooks as module_hooks
from fastpack_trl.model.hooks import HookWatch, PartsHooked, hook_inside, users_hooks_off
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
    watch, hooked = HookWatch(model, "model"), PartsHooked()
    for register, hook, expected in (
        (partial(REGISTER[kind], model[1][0]), nothing, f"the {kind} nothing on model.1.0"),
        (partial(REGISTER[kind], model[1][0]), partial(nothing, 1), f"the {kind} nothing on model.1.0"),
        (REGISTER_GLOBAL[kind], Callback(), f"the global {kind} Callback"),
    ):
        assert (watch.look(), hooked(model[0], model[1][0])) == ("", False)
        handle = register(hook)
        try:
            assert (watch.look(), hooked(model[0], model[1][0])) == (expected, True)
        finally:
            handle.remove()
    assert (watch.look(), hooked(model[0], model[1][0])) == ("", False)
    model[0].forward = nothing
    assert hooked(*model)


def test_a_recompute_takes_the_path_of_its_forward() -> None:
    layer, hooked, answers = nn.Linear(2, 2), PartsHooked(), list[bool]()
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: answers.append(hooked(layer)))
    assert not hooked(layer)
    handle = layer.register_forward_hook(nothing)
    leaf.sum().backward()
    answers.append(hooked(layer))
    handle.remove()
    leaf.sum().backward()
    answers.append(hooked(layer))
    assert answers == [False, True, True, False]


def test_a_hook_that_comes_later_is_found_without_walking_the_model_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    watch = HookWatch(model)
    watch.look()
    model[1][1] = nn.GELU()
    handle = model[1][1].register_forward_hook(nothing)
    assert watch.look() == "the forward hook nothing on 1.1"
    handle.remove()
    model[0]._forward_hooks = type(model[0]._forward_hooks)()
    model[0].register_forward_hook(nothing)
    assert watch.look() == "the forward hook nothing on 0"
    watch = HookWatch(network())
    watch.look()
    monkeypatch.setattr(module_hooks, "hook_inside", lambda *_: "walked")
    assert watch.look() == "", "no hook came: the model is not walked again"
    torch.ones(1, requires_grad=True).register_hook(nothing)
    assert watch.look() == "walked"


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
    model(torch.ones(1, 2))

    def note(name: str, *_args: Any) -> None:
        seen.append(name)

    handles = [
        *(register(model[0], partial(note, f"own {kind}")) for kind, register in REGISTER.items()),
        model[0].register_forward_hook(partial(note, "second")),
        *(register(partial(note, f"global {kind}")) for kind, register in REGISTER_GLOBAL.items()),
    ]
    gone = model[0].register_forward_hook(partial(note, "gone"))

    def run() -> list[str]:
        seen.clear()
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return list(seen)

    try:
        before = run()
        with suppress(KeyboardInterrupt), users_hooks_off(model):
            assert run() == []
            gone.remove()
            handles.append(model[0].register_forward_hook(partial(note, "new")))
            raise KeyboardInterrupt
        after = run()
    finally:
        for handle in handles:
            handle.remove()
    assert after == ["new" if name == "gone" else name for name in before] != before
    assert run() == []
