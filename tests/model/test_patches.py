"""Changes to foreign objects: taken back, shared, in no copy."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastpack_trl.model.patches import attribute_set, shared


class Owner:
    value: Any = "of the class"


def test_an_attribute_is_as_before_also_after_an_exception() -> None:
    owner = Owner()
    with pytest.raises(KeyError), attribute_set(owner, "value", "ours"):
        assert owner.value == "ours"
        with attribute_set(owner, "value", "inner"), attribute_set(Owner, "value", "changed"):
            assert (owner.value, Owner.value) == ("inner", "changed")
        assert owner.value == "ours"
        raise KeyError
    assert vars(owner) == {}
    assert owner.value == "of the class"


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    owner = Owner()
    with attribute_set(owner, "value", "ours"):
        owner.value = "theirs"
    assert owner.value == "theirs"
    with attribute_set(owner, "value", "ours"):
        del owner.value
    assert vars(owner) == {}


def test_a_compiled_model_gets_the_attribute_itself() -> None:
    inner = nn.Linear(1, 1)
    compiled = torch.compile(inner)
    with attribute_set(compiled, "train", "ours"):
        assert (vars(compiled)["train"], "train" in vars(inner)) == ("ours", False)
    assert "train" not in vars(compiled)


def test_a_shared_change_is_made_once_and_goes_with_its_last_holder() -> None:
    owner, seen = nn.Linear(1, 1), []

    @contextlib.contextmanager
    def change() -> Iterator[str]:
        seen.append("made")
        yield "it"
        seen.append("taken back")

    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    assert first.enter_context(shared(owner, "_held", change)) == "it"
    assert second.enter_context(shared(owner, "_held", change)) == "it"
    for duplicate in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        with shared(duplicate, "_held", contextlib.nullcontext):
            assert seen == ["made"]
    first.close()
    assert seen == ["made"]
    second.close()
    assert seen == ["made", "taken back"]
    assert "_held" not in vars(owner)
