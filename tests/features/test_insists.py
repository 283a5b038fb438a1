"""A field that is given by name stops `train()` if what it asks for is unavailable; nothing else stops for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from trainer_material import assert_line, build, callback, make_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl import FastSFTTrainer
from fastpack_trl.config import _CHOICES, Settings
from fastpack_trl.testing import tiny_model

Options = dict[str, Any]


class OwnCollator(DataCollatorForLanguageModeling):
    """Not TRL's own class, so that rows stay stock's."""


Substep = callback("on_substep_end", lambda *_: None, "Substep")


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.float().mean()


def spoil(trainer: Any) -> None:
    next(iter(trainer.model.parameters())).data.fill_(float("nan"))


def collate(trainer: Any) -> None:
    trainer.data_collator = OwnCollator(pad_token_id=0, padding_free=True)


class Case(NamedTuple):
    """A run in which the value of a field cannot be had, or need not."""

    stops: str = ""
    """What the error says; empty where the value holds as it is."""
    reason: str = ""
    """Of the report where nothing stops."""
    options: Options = {}  # noqa: RUF012 - none is written to
    given: Options = {}  # noqa: RUF012
    refused: bool = False
    """The trainer stops when it is made: wrong for the machine or the model, or another field says otherwise."""
    contradicts: bool = False
    """The latter: `train()` stops too, if the field was set since."""
    late: Callable[[Any], None] | None = None
    """What is done to the trainer before `train()`; not before it evaluates."""


KEEPS_ALL = {"gradient_checkpointing": False}
CONTRADICTED = Case("gradient_checkpointing=False", options=KEEPS_ALL, refused=True, contradicts=True)
NO_KERNEL, COLLATED = Case("cannot be used here", refused=True), Case("custom data collator OwnCollator", late=collate)
SUBSTEP = Case("on_substep_end of Substep", "", {"gradient_accumulation_steps": 2}, {"callbacks": [Substep()]})
CASES: dict[tuple[str, str], Case] = {
    **{("packed_attention", name): NO_KERNEL for name in ("varlen", "xformers", "flash_attention_4")},
    **{("packed_attention", name): COLLATED for name in ("per_document", "sdpa")},
    ("verify_packing", "on"): Case("has non-finite values", late=spoil),
    ("lora", "on"): Case("the model has no LoRA layers"),
    ("frozen_base", "fp8"): Case("the model has no LoRA layers"),
    ("moe", "on"): Case("the model has no experts"),
    ("fused_layers", "on"): Case(
        "torch_compile=True", late=lambda trainer: setattr(trainer.args, "torch_compile", True)
    ),
    ("vision_rows", "on"): Case(reason="the data set has no images"),
    ("vision_tower", "on"): Case("the model has no tower"),
    ("cuda_graph", "on"): Case("the model is on cpu"),
    ("moe_quantize_experts", "on"): Case("has no expert stacks", refused=True),
    ("sync_free", "on"): Case("compute_loss_func needs the full logits", given={"compute_loss_func": summed}),
    ("merge_accumulation", "on"): SUBSTEP,
    ("share_prefixes", "on"): Case("NEFTune's noise", options={"neftune_noise_alpha": 5.0}),
    ("activation_memory", "keep"): Case(reason="keeps all activations", options=KEEPS_ALL),
    **{("activation_memory", level): CONTRADICTED for level in ("checkpoint", "offload")},
    **{("checkpoint_offload", mode): CONTRADICTED for mode in ("double_buffer", "single_buffer")},
}
UNPACKED = {"packing": False}
HOLD = {
    ("merge_accumulation", "on"): Case(reason="gradient_accumulation_steps is 1"),
    ("verify_packing", "on"): Case("", "a row is one document", UNPACKED, {"compute_loss_func": summed}),
    ("packed_attention", "sdpa"): Case(reason="sdpa gains nothing from one long row", options=UNPACKED),
    ("checkpoint_offload", "double_buffer"): Case(reason="no device memory to spare"),
}
"""Where there is nothing to do: what was asked for is so."""


def make(folder: Path, case: Case, **fast: Any) -> FastSFTTrainer:
    given = {"eval_dataset": make_dataset("text", 2)} | case.given
    options = {"packing": True, "max_steps": 1, "eval_strategy": "no", **case.options}
    return build(FastSFTTrainer, folder, model=tiny_model("llama"), fast=fast, trainer=given, **options)


def test_every_value_of_every_field_has_a_case() -> None:
    defaults = Settings()
    values = {(field, value) for field, choices in _CHOICES.items() for value in choices}
    assert {(field, value) for field, value in values if value not in (getattr(defaults, field), "off")} == set(CASES)


@pytest.mark.parametrize(("field", "value"), CASES)
def test_what_is_given_by_name_stops_train_and_nothing_else(field: str, value: str, tmp_path: Path) -> None:
    case = CASES[field, value]
    if case.refused:
        with pytest.raises(ValueError, match=case.stops):
            make(tmp_path, case, **{field: value})
        if not case.contradicts:
            return
    trainer = make(tmp_path, case, **({} if case.contradicts else {field: value}))
    setattr(trainer.args, field, value)
    trainer.evaluate()
    if case.late is not None:
        case.late(trainer)
    if case.stops:
        with pytest.raises(ValueError, match=case.stops) as error:
            trainer.train()
        assert str(error.value).startswith(f"{field}={value!r}: ")
        assert "set " in str(error.value) or "leave" in str(error.value), "a remedy"
        assert trainer.state.global_step == 0
    else:
        trainer.train()
        assert case.reason in trainer.fastpack_report[field].reason
    if case.late is None:
        trainer.evaluate()
        setattr(trainer.args, field, getattr(Settings(), field))
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize(("field", "value"), HOLD)
def test_where_there_is_nothing_to_do_nothing_stops(field: str, value: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, HOLD[field, value], **{field: value})
    trainer.train()
    assert_line(trainer, field, HOLD[field, value].reason, status="off")


COUNTED = "fastpack_trl.checkpointing.planned.layer_costs"
NO_COPIES = "no device memory to spare and no copy engine"


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize(
    ("field", "value", "broken", "said"),
    [
        ("activation_memory", "offload", COUNTED, f"the model is on cpu: there is {NO_COPIES}"),
        ("activation_memory", "checkpoint", COUNTED, "no plan can be made: no such thing"),
        ("moe", "on", "fastpack_trl.features.moe.experts_modules", "LlamaForCausalLM cannot be read: .*"),
    ],
)
def test_what_cannot_be_used_or_read_stops_train_but_no_evaluation(
    field: str, value: str, broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise (AttributeError if field == "moe" else ValueError)("no such thing")

    monkeypatch.setattr(broken, fail)
    trainer = make(tmp_path, Case(), **{field: value})
    trainer.evaluate()
    assert field != "moe" or "cannot be read" in trainer.fastpack_report["moe"].reason
    with pytest.raises(ValueError, match=rf"^{field}='{value}': {said}; set {field}='auto' to train without it if"):
        trainer.train()
    assert trainer.state.global_step == 0
    if field == "activation_memory":
        trainer.args.activation_memory, trainer.args.activation_memory_gib = "auto", 1.0
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize(("setting", "remedies"), [("on", 1), ("auto", 0)])
def test_what_ends_in_the_middle_of_a_run_warns_once_with_the_remedy(
    setting: str, remedies: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    trainer = make(tmp_path, Case(options=options), merge_accumulation=setting)

    def add(state: Any, model: Any) -> None:
        if state.global_step == 2:
            trainer.add_callback(Substep())

    trainer.add_callback(callback("on_step_begin", add)())
    trainer.train()
    assert trainer.state.global_step == 4
    (said,) = [text for text in caplog.messages if "on_substep_end of Substep" in text]
    assert "merge_accumulation: stock from here on: " in said
    assert said.count("; set merge_accumulation='auto' to train without it") == remedies
