"""Host work that is no longer done in each micro-batch has the effect it had."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import assert_equal
from torch import nn
from trainer_material import build, callback, figures, train
from transformers import PreTrainedModel, Trainer, TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

BOTH = (FastSFTTrainer, SFTTrainer)
APART = {"merge_accumulation": "off"}  # these tests do something in each micro-batch


class Poison(TrainerCallback):
    """One weight of the head is NaN during the given micro-batches; weights as before after each step."""

    def __init__(self, steps: dict[int, tuple[int, ...]]) -> None:
        self.steps = steps
        self.micro = 0
        self.filter_seen: list[bool] = []

    def _set(self, model: nn.Module, step: int) -> None:
        weight = model.get_output_embeddings().weight
        with torch.no_grad():
            weight.copy_(self.clean)
            if self.micro in self.steps.get(step, ()):
                weight[3] = torch.nan

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.clean = model.get_output_embeddings().weight.detach().clone()
            self.state = copy.deepcopy(model.state_dict())
        self.micro = 0
        self._set(model, state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.filter_seen.append(args.logging_nan_inf_filter)
        self.micro += 1
        self._set(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.filter_seen.append(args.logging_nan_inf_filter)
        model.load_state_dict(self.state)

    def on_evaluate(self, args: Any, *rest: Any, **kwargs: Any) -> None:
        self.filter_seen.append(args.logging_nan_inf_filter)

    on_log = on_evaluate


@pytest.mark.parametrize("filters", [True, False], ids=["filtered", "unfiltered"])
def test_a_loss_that_is_not_finite_is_logged_as_in_stock(filters: bool, tmp_path: Path) -> None:
    logs = []
    for cls in BOTH:
        model = tiny_model("qwen3", tie_word_embeddings=False)
        poison = Poison({1: (1,), 2: (0, 1), 4: (0,)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = train(
            cls, tmp_path, model=model, packing=True, gradient_accumulation_steps=2, max_steps=6, logging_steps=3,
            eval_steps=3, logging_nan_inf_filter=filters, fast=APART,
            trainer={"callbacks": [poison], "optimizers": (optimizer, schedule)},
        )  # fmt: skip
        assert set(poison.filter_seen) == {filters}
        assert trainer.args.logging_nan_inf_filter is filters
        logs.append(figures(trainer))
    assert_equal(*logs, nan_ok=True)
    losses = torch.tensor([row["loss"] for row in logs[0] if "loss" in row])
    assert losses.isfinite().all().item() is filters


def test_what_is_installed_for_a_run_is_gone_after_an_exception(tmp_path: Path) -> None:
    modules = nn.modules.module
    hooks = (modules._global_parameter_registration_hooks, modules._global_module_registration_hooks)
    before, during = list(map(dict, hooks)), []

    def fail(*_: Any) -> None:
        during.append(sum(map(len, hooks)) - sum(map(len, before)))
        raise KeyboardInterrupt

    class Keeps(FastSFTTrainer):
        def _track_num_input_tokens(self, inputs: Any) -> None:
            assert self.args.logging_nan_inf_filter is True

    given = {"callbacks": [callback("on_substep_end", fail)()]}
    trainer = build(Keeps, tmp_path, packing=True, gradient_accumulation_steps=2, trainer=given)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert during == [2]
    assert list(map(dict, hooks)) == before
    assert trainer.args.logging_nan_inf_filter is True
    assert not trainer.fastpack_run.sync_free.host.active
    assert not {"train", "zero_grad"} & set(vars(trainer.model))


def test_a_subclass_that_looks_at_the_loss_sees_it_as_it_is(tmp_path: Path) -> None:
    class Looks(FastSFTTrainer):
        finite: bool = True

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.finite = self.finite and bool(loss.isfinite())
            return loss

    model = tiny_model("qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = torch.nan
    unproven = {"verify_packing": "off"}  # the proof would find the NaN
    trainer = train(Looks, tmp_path, model=model, packing=True, max_steps=1, eval_strategy="no", fast=unproven)
    assert isinstance(trainer, Looks)
    assert not trainer.finite
    assert "training_step of Looks may look at the loss" in trainer.fastpack_report["sync_free"].reason


class Walks(TrainerCallback):
    """Counts the walks over the whole model in the last step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        for name in ("train", "zero_grad", "named_parameters"):
            patch.setattr(nn.Module, name, self._counted(getattr(nn.Module, name)))
        patch.setattr(PreTrainedModel, "num_parameters", self._counted(PreTrainedModel.num_parameters))

    def _counted(self, real: Any) -> Any:
        def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.count.update([real.__name__] * hasattr(module, "lm_head"))
            return real(module, *args, **kwargs)

        return count

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.count.clear()


@pytest.mark.parametrize("norm", [1e-3, 0.0], ids=["clipped", "only logged"])
def test_modes_gradients_and_flops_walk_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    counts, logs, flops = [], [], []
    for cls in BOTH:
        with monkeypatch.context() as patch:
            walks = Walks(patch)
            trainer = train(
                cls, tmp_path, packing=True, eval_strategy="no", max_grad_norm=norm, trainer={"callbacks": [walks]},
                fast={"verify_packing": "off"},
            )  # fmt: skip
        counts.append(walks.count)
        logs.append(figures(trainer))
        flops.append(trainer.state.total_flos)
    assert_equal(*logs, nan_ok=True)
    assert all("grad_norm" in row for row in logs[0] if "loss" in row)
    assert flops[0] == flops[1] > 0
    assert not counts[0]
    assert set(counts[1]) == {"train", "zero_grad", "named_parameters", "num_parameters"}


def test_a_patched_clipping_gets_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[nn.Module] = []
    clip = Trainer._clip_grad_norm
    monkeypatch.setattr(Trainer, "_clip_grad_norm", lambda self, model: given.append(model) or clip(self, model))
    trainer = train(FastSFTTrainer, tmp_path, packing=True, eval_strategy="no", fast={"verify_packing": "off"})
    assert given == [trainer.model] * 4


def _inserts_a_layer(model: Any, optimizer: Any) -> None:
    layers, config = model.base_model.layers, model.config
    layers.insert(1, copy.deepcopy(layers[0]))
    config.num_hidden_layers += 1
    config.layer_types = [*config.layer_types, config.layer_types[0]]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index


def _new_head(model: Any, optimizer: Any, *, registered: bool = True) -> None:
    old = model.lm_head.weight
    new = nn.Parameter(old.detach().clone())
    if registered:
        model.lm_head.weight = new
    else:
        model.lm_head._parameters["weight"] = new
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]


def _trains_another(model: Any, optimizer: Any) -> None:
    """A parameter that is not the model's."""
    model.beside = [nn.Parameter(torch.zeros(1))]
    model.beside[0].grad = torch.ones(1)
    optimizer.param_groups[0]["params"].append(model.beside[0])


def _unfreezes(model: Any, optimizer: Any) -> None:
    model.base_model.embed_tokens.weight.requires_grad_(True)


def _adds_dropout(model: Any, optimizer: Any) -> None:
    model.base_model.layers[0].dropout = nn.Dropout(0.5).eval()


def _evaluates_a_part(model: Any, optimizer: Any) -> None:
    model.base_model.layers[1].mlp.eval()


def _evaluates(model: Any, optimizer: Any) -> None:
    model.eval()


CHANGES = {
    "a layer": _inserts_a_layer, "a head": _new_head,
    "a head written past registration": functools.partial(_new_head, registered=False),
    "another parameter": _trains_another, "an unfrozen parameter": _unfreezes, "dropout": _adds_dropout,
    "a part in evaluation mode": _evaluates_a_part, "evaluation mode": _evaluates,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_a_callback_changes_trains_as_in_stock(change: str, tmp_path: Path) -> None:
    """Its gradients are clipped and reset, and its modules are in training mode."""

    class Changes(TrainerCallback):
        def __init__(self) -> None:
            self.left = 0
            self.beside: list[bool] = []

        def on_step_begin(self, *_: Any, model: Any = None, **kwargs: Any) -> None:
            self.left += sum(parameter.grad is not None for parameter in model.parameters())

        def on_step_end(self, _: Any, state: Any, *rest: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                CHANGES[change](model, optimizer)
            elif hasattr(model, "beside"):
                self.beside.append(model.beside[0].grad is not None)
            if state.global_step > 1:
                assert all(module.training for module in model.modules())

    logs = []
    for cls in BOTH:
        changes, model = Changes(), tiny_model("qwen3", tie_word_embeddings=False)
        model.base_model.embed_tokens.weight.requires_grad_(change != "an unfrozen parameter")
        trainer = train(
            cls, tmp_path, model=model, packing=True, eval_strategy="no", optim="sgd", max_grad_norm=1e-2,
            trainer={"callbacks": [changes]}, fast={"verify_packing": "off", "packed_attention": "per_document"},
        )  # fmt: skip
        assert not changes.left
        assert all(changes.beside)
        logs.append(figures(trainer))
    assert_equal(*logs, nan_ok=True)
