"""What is read from a model: its windows, sinks and softcap, and the implementation that the user chose."""

from __future__ import annotations

import pytest

from fastpack_trl.model.facts import asked_for, read_features
from fastpack_trl.testing import FAMILIES, tiny_model


def test_only_a_choice_of_the_user_counts_as_asked_for() -> None:
    assert asked_for(tiny_model("qwen3")) is None
    assert asked_for(tiny_model("qwen3", attn_implementation="eager")) == "eager"
    assert asked_for(tiny_model("gpt_oss")) is None, "gpt_oss has no sdpa: eager is its default"
    assert asked_for(tiny_model("qwen3"), "sdpa") == "sdpa"
    assert asked_for(tiny_model("qwen3", attn_implementation="eager"), {"": "eager"}) == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_sinks_and_softcap_of_a_family_are_read(family: str) -> None:
    model = tiny_model(family)
    features = read_features(model)
    assert (features.model_type, features.dropout) == (family, 0)
    assert (features.sinks, features.softcap) == (family == "gpt_oss", family == "gemma2")
    if family in ("mistral", "gemma2", "gpt_oss", "cohere2"):
        assert features.windows == {5}
    if family == "olmoe":  # its window goes to attention, but not to its mask
        model.config.sliding_window = 4
        assert read_features(model).windows == frozenset()
