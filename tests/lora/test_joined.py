"""Projections of one input share products: the same results and gradients, fewer products, and who stays alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import (
    adapted,
    any_ids,
    assert_trains_as_peft,
    functions_for_every_size,  # noqa: F401
    joint_error,
    reference_projection,
    step,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from trainer_material import assert_same_log, train
from transformers.utils import logging as transformers_logging
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.lora import siblings
from fastpack_trl.lora.adapters import CastAdapter
from fastpack_trl.lora.base_weight import BaseWeight
from fastpack_trl.lora.joined import joined_projection
from fastpack_trl.lora.joined_casts import JoinedCast, cast_joined
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

pytestmark = pytest.mark.usefixtures("functions_for_every_size")


class Held:
    """What a cast is set on."""


def draw(*shape: int, trained: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(trained)


def any_adapters(ranks: tuple[int, ...], outs: tuple[int, ...], wide: int) -> list[tuple[Tensor, Tensor, float]]:
    return [
        (draw(r, wide), draw(out, r), 0.5 + number) for number, (r, out) in enumerate(zip(ranks, outs, strict=True))
    ]


def compiled(*args: Any, **keywords: Any) -> Any:
    torch._dynamo.reset()
    function = partial(joined_projection, **keywords)
    return torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)(*args)


@pytest.mark.parametrize("project", [joined_projection, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_joined_projections_are_single_ones_to_float64s_rounding(
    project: Callable[..., list[Tensor]], by_torch: bool, bias: bool, seed: int
) -> None:
    """Ranks 1, odd and unlike, widths unlike, two or three projections, no tokens at all."""
    torch.manual_seed(seed)
    ranks = ((3, 3, 3), (1, 7), (5, 1, 2), (4, 4))[seed]
    outs, wide, tokens = (8, 3, 5)[: len(ranks)], 6, (4, 9, 0, 1)[seed]
    adapters, weights = any_adapters(ranks, outs, wide), [draw(out, wide, trained=False) for out in outs]
    biases = [draw(out) if bias else None for out in outs]
    x, factors = draw(1, tokens, wide), [torch.randn(1, tokens, out, dtype=torch.float64) for out in outs]
    leaves = [x, *(tensor for a, b, _ in adapters for tensor in (a, b)), *(each for each in biases if each is not None)]

    modules = [Held() for _ in ranks]
    cast_joined([modules], [adapters], torch.float64, adds_up=False)
    cast: JoinedCast = modules[0].fastpack_cast  # type: ignore[attr-defined]
    joined = project(x, weights, cast.a, cast.b, ranks, biases, by_torch=by_torch)
    single = [
        reference_projection(x, BaseWeight(weight), a, b * scaling, own)
        for weight, (a, b, scaling), own in zip(weights, adapters, biases, strict=True)
    ]
    found = [
        torch.autograd.grad(sum((out * factor).sum() for out, factor in zip(each, factors, strict=True)), leaves)
        for each in (joined, single)
    ]
    for actual, expected in zip([*joined, *found[0]], [*single, *found[1]], strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_operators_pass_torchs_own_checks() -> None:
    torch.manual_seed(0)
    rows, a, b = (draw(*shape, trained=False) for shape in ((4, 6), (5, 6), (8, 5)))
    weights, ranks = [draw(5, 6, trained=False), draw(3, 6, trained=False)], [2, 3]
    bias, grad, reduced = draw(8, trained=False), draw(4, 8, trained=False), rows.mm(a.t())
    check = torch.library.opcheck
    for own in (bias, None):
        check(torch.ops.fastpack.joined_product.default, (rows, reduced, b, own, weights, ranks))
    check(torch.ops.fastpack.joined_grad_input.default, (grad, grad.mm(b), a, weights))


def products(model: Any, count: int) -> list[int]:
    """Matrix products of forward and of backward in a model of so many layers, those inside of operators too."""
    backbone = model.get_base_model().model
    backbone.layers = backbone.layers[:count]
    embedded = backbone.embed_tokens(any_ids()).detach().requires_grad_()
    counted = []
    with torch.profiler.profile() as forward:
        out = backbone(inputs_embeds=embedded, use_cache=False).last_hidden_state
    with torch.profiler.profile() as backward:
        out.sum().backward()
    for profile in (forward, backward):
        names = [event.key for event in profile.events() for _ in range(1)]
        counted.append(sum(name in ("aten::mm", "aten::addmm") for name in names))
    return counted


def test_products_of_a_layer_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for most in (0, siblings.MOST_RANKS):
        monkeypatch.setattr(siblings, "MOST_RANKS", most)
        per_layers = []
        for layers in (1, 3):
            model = adapted("qwen3", num_hidden_layers=3)
            apply_lora(model)
            per_layers.append(products(model, layers))
        found[most] = [(more - few) / 2 for few, more in zip(*per_layers, strict=True)]
    single, joined = found.values()
    # A, B and base of each; dX by base and by A, dA, dB and what comes through B.
    assert single == [7 * 3, 7 * 5]
    # One product with all As; one each for what comes through the Bs, for dA, for dB, and for dX by the As.
    assert joined == [(1 + 2 * 3) + (1 + 2 * 2) + 2 * 3, (3 + 4) + (2 + 4) + 2 * 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_are_those_of_single_adapters_and_gradients_go_back_to_each(dtype: torch.dtype) -> None:
    """Of several groups, one of which no loss reaches: its adapters get no gradient, not zeros."""
    torch.manual_seed(0)
    groups = [any_adapters((2, 3), (4, 5), 6) for _ in range(3)]
    modules = [[Held(), Held()] for _ in groups]
    cast_joined(modules, groups, dtype, adds_up=False)
    casts: list[JoinedCast] = [pair[0].fastpack_cast for pair in modules]  # type: ignore[attr-defined]
    for cast, pair, group in zip(casts, modules, groups, strict=True):
        assert pair[1].fastpack_cast is cast  # type: ignore[attr-defined]
        (a0, b0, s0), (a1, b1, s1) = group
        assert torch.equal(cast.a, torch.cat([a0, a1]).to(dtype))
        assert torch.equal(cast.b, torch.block_diag(b0 * s0, b1 * s1).to(dtype))
        assert cast.parameters == (a0, b0, a1, b1)
    (casts[0].a.square().sum() + casts[2].b.square().sum() + casts[2].a.sum()).backward()
    assert all(tensor.grad is None for a, b, _ in groups[1] for tensor in (a, b))
    for a, b, scaling in groups[2]:
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, torch.ones_like(a))
        torch.testing.assert_close(b.grad, 2 * b.detach() * scaling**2, rtol=1e-5, atol=1e-5)
        assert b.grad.untyped_storage().nbytes() == b.nbytes
    assert torch.equal(groups[0][0][1].grad, torch.zeros(4, 2, dtype=torch.float64))  # type: ignore[arg-type]


def joined_layers(model: Any) -> int:
    return sum(isinstance(getattr(module, "fastpack_cast", None), JoinedCast) for module in model.modules())


def q_proj(model: Any, name: str = "q_proj") -> Any:
    return getattr(model.base_model.model.model.layers[0].self_attn, name)


EVERY = 2 * (3 + 2)
"""Projections of two layers that share an input with others."""


@pytest.mark.parametrize(
    ("family", "settings", "joined"),
    [
        ("qwen3", {"r": 1}, EVERY),
        ("qwen3", {"r": 5}, EVERY),
        ("qwen3", {"rank_pattern": {"q_proj": 2, "v_proj": 7}, "alpha_pattern": {"k_proj": 3}}, EVERY),
        ("qwen3", {"rank_pattern": {"layers.1.self_attn.q_proj": 3}}, EVERY),
        ("qwen3", {"target_modules": ["q_proj", "v_proj", "up_proj"]}, 4),
        ("qwen3", {"target_modules": ["q_proj", "gate_proj"]}, 0),
        ("qwen3", {"target_modules": ["q_proj", "k_proj", "v_proj"], "modules_to_save": ["k_proj"]}, 4),
        ("qwen2", {"bias": "lora_only"}, EVERY),
        ("qwen2", {}, EVERY),
        ("qwen3", {"lora_dropout": 0.25}, 0),
        ("qwen3", {"r": 100}, 4),
        ("phi3", {}, 0),
    ],
    ids=str,
)
def test_settings_train_as_peft_joined_where_it_is_possible(family: str, settings: dict[str, Any], joined: int) -> None:
    models = [adapted(family, **settings).double() for _ in range(2)]  # fp32's own rounding grows from step to step
    before = {name: (p.shape, p.requires_grad) for name, p in models[1].named_parameters()}
    apply_lora(models[1])
    assert {name: (p.shape, p.requires_grad) for name, p in models[1].named_parameters()} == before
    assert models[1].state_dict().keys() == models[0].state_dict().keys()
    if "lora_dropout" not in settings:
        assert_trains_as_peft(*models)
    for model in models:
        torch.manual_seed(3)
        step(model, any_ids())
    assert_gradients_close(gradients(models[1]), gradients(models[0]))
    assert joined_layers(models[1]) == joined


def test_variants_and_4_bit_bases_are_as_before() -> None:
    model = adapted("qwen3", use_dora=True)
    assert not apply_lora(model).siblings
    trainable = adapted("qwen3")
    q_proj(trainable).base_layer.weight.requires_grad_()
    stock = copy.deepcopy(trainable)
    report = apply_lora(trainable)
    for each in (trainable, stock):
        for seed in (0, 1):
            step(each, any_ids(seed=seed))
    assert_gradients_close(gradients(trainable), gradients(stock))
    assert report.one_by_one == {"dropout, or one of them is not fast": 1}
    assert joined_layers(trainable) == EVERY - 3
    assert "not shared: 1 (dropout, or one of them is not fast)" in str(report)


def pre_hook(model: Any) -> None:
    q_proj(model, "k_proj").register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def hook(model: Any) -> None:
    q_proj(model, "k_proj").register_forward_hook(lambda _module, _args, out: out * 2)


def hook_on_a_part(model: Any) -> None:
    q_proj(model, "v_proj").lora_A["default"].register_forward_hook(lambda _module, _args, out: out * 2)


def another_forward(model: Any) -> None:
    attention = model.base_model.model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **keywords: forward(*args, **keywords)


def other_weight(model: Any) -> None:
    old = q_proj(model).base_layer.weight
    q_proj(model).base_layer.weight = nn.Parameter(old.detach() * 1.5, requires_grad=False)


def edited_weight(model: Any) -> None:
    with torch.no_grad():
        q_proj(model, "v_proj").base_layer.weight.mul_(1.5)


def merged_and_unmerged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def one_merged(model: Any) -> None:
    q_proj(model).merge()


def checkpointed(model: Any) -> None:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def evaluated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=any_ids())
    model.train()
    with torch.no_grad():
        model(input_ids=any_ids())


def rescaled(model: Any) -> None:
    q_proj(model).scaling["default"] = 3.0


def second_adapter(model: Any) -> None:
    torch.manual_seed(0)
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    model.set_adapter("other")


CHANGES = {
    pre_hook: EVERY - 3, hook: EVERY - 3, hook_on_a_part: EVERY - 3, another_forward: EVERY, other_weight: EVERY,
    edited_weight: EVERY, merged_and_unmerged: EVERY, one_merged: EVERY - 3, checkpointed: 0, rescaled: EVERY,
    evaluated: EVERY, second_adapter: 0,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_the_middle_of_a_run_is_as_in_peft(change: Callable[[Any], None]) -> None:
    models = [adapted("qwen3"), adapted("qwen3")]
    report = apply_lora(models[1])
    for model in models:
        step(model, any_ids())
        change(model)
        model.zero_grad()
        for seed in (1, 2):
            step(model, any_ids(seed=seed))
    assert_gradients_close(gradients(models[1]), gradients(models[0]))
    assert joined_layers(models[1]) == CHANGES[change]
    assert bool(report.one_by_one) == (change in (pre_hook, hook, hook_on_a_part))


def test_a_checkpoint_recomputes_what_ran_where_a_hook_came_in_between() -> None:
    models = [adapted("qwen3"), adapted("qwen3")]
    apply_lora(models[1])
    for model in models:
        loss = model(input_ids=any_ids(), labels=any_ids(), use_cache=False).loss
        pre_hook(model)
        loss.backward()
        step(model, any_ids(seed=1))
        step(model, any_ids(seed=2))
    assert_gradients_close(gradients(models[1]), gradients(models[0]))


def test_what_runs_alone_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted("qwen3")
    apply_lora(model)
    pre_hook(model)
    transformers_logging.warning_once.cache_clear()
    logger = logging.getLogger("fastpack_trl.lora.siblings")
    logger.addHandler(caplog.handler)
    try:
        for seed in range(3):
            step(model, any_ids(seed=seed))
    finally:
        logger.removeHandler(caplog.handler)
    said = {id(record): record.getMessage() for record in caplog.records if record.name == logger.name}
    assert list(said.values()) == ["lora: projections of one input run one by one (hooks on one of them)"]


class Skips(nn.Module):
    """Calls one of two in every other forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return out + self.second(x)


def test_one_that_is_not_called_and_one_that_is_called_by_itself() -> None:
    """Past what the source shows: by a subclass whose forward is set on the class later."""
    torch.manual_seed(0)
    model = tiny_model("qwen3")
    model.model.layers[0].extra = Skips()
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["first", "second", "o_proj"], init_lora_weights=False))
    report = apply_lora(peft)
    (group,) = report.siblings
    extra = peft.base_model.model.model.layers[0].extra
    x = torch.randn(5, 8)
    twin = copy.deepcopy(extra)
    step(peft, any_ids())  # casts
    assert isinstance(extra.first.fastpack_cast, JoinedCast)
    alone = extra.second(x)  # nothing was begun
    torch.testing.assert_close(alone, twin.second(x))
    torch.testing.assert_close(extra.first(x), twin.first(x))  # nobody takes the second's
    torch.testing.assert_close(extra.first(x), twin.first(x))
    assert group.alone == "one of them was not called"
    torch.testing.assert_close(extra(x), twin(x))
    edited = x.clone()
    out = extra.first(edited)
    edited.mul_(2)
    torch.testing.assert_close(out + extra.second(edited), twin.first(x) + twin.second(2 * x))
    step(peft, any_ids(seed=1))
    assert isinstance(extra.first.fastpack_cast, CastAdapter)
    torch.testing.assert_close(extra(x), twin(x))


def test_nothing_is_held_between_steps_and_after_a_revert() -> None:
    model = adapted("qwen3")
    report = apply_lora(model)
    step(model, any_ids())
    assert report.siblings
    assert all(group._source is None and not group._outs for group in report.siblings)
    twin = copy.deepcopy(model)
    step(twin, any_ids())
    assert joined_layers(twin) == 0
    report.revert()
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("fastpack")]


def test_a_run_of_a_trainer_joins_and_logs_as_stock(tmp_path: Path) -> None:
    options: dict[str, Any] = {"packing": True, "max_steps": 4, "eval_strategy": "no"}
    ours, stock = (
        train(
            cls, tmp_path / cls.__name__, model=tiny_model("qwen3"), trainer={"peft_config": LoraConfig(r=4)}, **options
        )
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock)
    assert "groups share products" in ours.fastpack_report["lora"].reason


def test_joined_errors_in_bf16_are_no_larger_than_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joint gradient error of a step under autocast against float64."""
    errors = []
    for seed in range(6):
        exact = adapted("qwen3", seed=seed, dtype=torch.bfloat16).double()
        step(exact, any_ids(length=64, seed=seed))
        row = []
        for most in (0, 256):
            monkeypatch.setattr(siblings, "MOST_RANKS", most)
            model = adapted("qwen3", seed=seed, dtype=torch.bfloat16)
            apply_lora(model)
            step(model, any_ids(length=64, seed=seed), autocast=True)
            row.append(joint_error(gradients(model), gradients(exact)))
        errors.append(row)
    single, joined = torch.tensor(errors).mean(0).tolist()
    assert joined <= 1.05 * single
