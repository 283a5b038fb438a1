"""The fields of the config: what they take, whoever sets them and when, and where their choices are written."""

from __future__ import annotations

from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trl import SFTConfig

from fastpack_trl import FastSFTConfig
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.config import _CHOICES, Settings

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [SFTConfig, FastSFTConfig])
@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("lora", "nonsense", "lora='nonsense' is not available: use one of auto, on, off"),
        ("packed_attention", "varlne", "did you mean"),
        ("packed_attention", "flahs", r"packed_attention='flahs'.*use one of"),
        ("activation_memory_gib", 0, r"activation_memory_gib=0 must be a number above 0"),
        ("activation_memory_gib", float("inf"), r"activation_memory_gib=inf must be a number above 0"),
        ("activation_memory_gib", "many", r"activation_memory_gib='many' must be a number above 0"),
    ],
)
def test_a_wrong_value_is_refused_also_if_set_on_a_config(kind: Any, field: str, wrong: object, message: str) -> None:
    config = kind(use_cpu=True)
    setattr(config, field, wrong)
    with pytest.raises(ValueError, match=message):
        Settings.of(config)
    with pytest.raises(ValueError, match=message):
        Settings(**{field: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SFTConfig, FastSFTConfig])
def test_a_value_that_was_set_on_a_config_is_normalised(kind: Any) -> None:
    config = kind(use_cpu=True)
    config.sync_free, config.packed_attention, config.activation_memory_gib = False, "ON", "3"
    found = Settings.of(config)
    assert (found.sync_free, found.packed_attention, found.activation_memory_gib) == ("off", "auto", 3.0)
    for value, expected in {True: "auto", False: "off", "OFF": "off", "true": "auto"}.items():
        config.packed_attention = config.verify_packing = value
        found = Settings.of(config)
        assert (found.packed_attention, found.verify_packing) == (expected, "off" if expected == "off" else "on")


def test_every_backend_can_be_asked_for_and_nothing_else() -> None:
    assert set(_CHOICES["packed_attention"]) == {"auto", *BACKENDS, "off"}
    assert len(set(_CHOICES["packed_attention"])) == len(_CHOICES["packed_attention"])


@pytest.mark.parametrize("own", fields(Settings), ids=lambda own: own.name)
def test_the_docstring_has_the_help_of_every_field(own: Field[Any]) -> None:
    assert f"{own.name}: {own.metadata['help']}" in " ".join(str(FastSFTConfig.__doc__).split())


REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient_checkpointing=False keeps all": ({"activation_memory": "checkpoint"}, {"gradient_checkpointing": False}),
    "without checkpointing": ({"checkpoint_offload": "double_buffer"}, {"gradient_checkpointing": False}),
    "use_reentrant=True stores": ({"checkpoint_offload": "single_buffer"}, REENTRANT),
    "'every_n_layers': 2": ({"activation_memory": "keep"}, {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}),
    "='double_buffer' decides": ({"activation_memory": "checkpoint"}, {"checkpoint_offload": "double_buffer"}),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictory_fields_stop_config_and_training_alone(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = CONTRADICTIONS[message]
    make_config = partial(FastSFTConfig, use_cpu=True, bf16=False, **other)
    with pytest.raises(ValueError, match=message) as error:
        make_config(**asked)
    assert next(iter(asked)) in str(error.value)
    config = make_config()
    for name, value in asked.items():
        setattr(config, name, value)
    assert Settings.of(config, training=False) is config
    with pytest.raises(ValueError, match=message):
        Settings.of(config)
    monkeypatch.setenv("FASTPACK_DISABLE", "1")
    config = make_config(**asked)
    assert Settings.of(config) is config


def test_levels_that_recompute_nothing_go_with_no_checkpointing() -> None:
    for level in ("auto", "keep", "off"):
        for how in (None, {"use_reentrant": False}):
            given = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": how, "use_cpu": True}
            FastSFTConfig(bf16=False, activation_memory=level, **given)
    FastSFTConfig(use_cpu=True, bf16=False, activation_memory="offload", checkpoint_offload="single_buffer")
