"""Module hooks of the user are found by name, and hidden as a whole; `tests/test_users_hooks.py` trains with them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hook_material import REGISTER, REGISTER_GLOBAL
from torch import nn
from torch.utils.module_tracker import ModuleTracker

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
