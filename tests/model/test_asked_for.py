"""The attention implementation that the user chose, as told from the defaults of transformers."""

from __future__ import annotations

from fastpack_trl.model.facts import asked_for
from fastpack_trl.testing import tiny_model


def test_only_a_choice_of_the_user_counts_as_asked_for() -> None:
    assert asked_for(tiny_model("qwen3")) is None
    assert asked_for(tiny_model("qwen3", attn_implementation="eager")) == "eager"
    assert asked_for(tiny_model("gpt_oss")) is None, "gpt_oss has no sdpa: eager is its default"
    assert asked_for(tiny_model("qwen3"), "sdpa") == "sdpa"
    assert asked_for(tiny_model("qwen3", attn_implementation="eager"), {"": "eager"}) == "eager"
