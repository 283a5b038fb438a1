"""`fused_layers`: runs are TRL's, norms of heads go into the rotation where nothing reads them, the report says why."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preference_material
import pytest
import torch
from old_device import forced_capability
from peft import LoraConfig
from trainer_material import assert_line, assert_same_log, both, callback, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches
from fastpack_trl.features import fused_layers as feature
from fastpack_trl.kernels import rotary as rotary_module
from fastpack_trl.kernels.fused_form import NormForm
from fastpack_trl.layers.pending import PendingNorm
from fastpack_trl.layers.replace import fused_layers
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

ON = {"fused_layers": "on"}


def unfreeze(_state: Any, model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.requires_grad_(True)


@pytest.mark.parametrize(
    "options",
    [
        {"family": "qwen3"},
        {"family": "gemma3_text", "gradient_checkpointing": True, "fast": ON | {"activation_memory": "checkpoint"}},
        {"family": "exaone4", "trainer": {"peft_config": LoraConfig(r=4, target_modules="all-linear")}},
        {"family": "qwen3", "trainer": {"peft_config": LoraConfig(r=4, target_modules="all-linear")}, "deed": unfreeze},
    ],
    ids=["full", "checkpointed", "without rotation in a layer", "unfrozen"],
)
def test_a_run_learns_as_stock(options: dict[str, Any], tmp_path: Path) -> None:
    deed = options.get("deed")
    more = {"packing": True, "fast": ON, **{key: value for key, value in options.items() if key != "deed"}}
    if deed is not None:
        more["trainer"] = {"callbacks": [callback("on_step_end", deed)()], **more["trainer"]}
    ours, stock = both(tmp_path, **more)
    assert_same_log(ours, stock)
    assert_line(ours, "fused_layers", "rotary 2 of 2, gate 2 of 2", status="on", path="fused")
    assert not [name for module in ours.model.modules() for name in vars(module) if name.startswith("_fastpack_fused")]


@pytest.mark.parametrize(("name", "lora"), [("DPO", True), ("DPO", False), ("GRPO", True)])
def test_other_trainers_learn_as_stock(name: str, lora: bool, tmp_path: Path) -> None:
    """A reference of its own gets the same kernels: as long as both models are equal, so are their roundings."""

    def around(trainer: Any) -> Any:
        trainer.args.fused_layers = "on"  # fields are read when `train` begins
        return nullcontext()

    ours, stock = preference_material.both(name, tmp_path, around=around, lora=lora)
    preference_material.assert_same(ours, stock)
    assert lora or ours.state.log_history[0]["rewards/chosen"] == 0.0
    assert_line(ours, "fused_layers", status="on")


def test_auto_needs_kernels(tmp_path: Path) -> None:
    assert_line(train(FastSFTTrainer, tmp_path, packing=True), "fused_layers", "its kernels need CUDA", status="off")
    args, settings = SimpleNamespace(torch_compile=False), SimpleNamespace(fused_layers="auto")
    run: Any = SimpleNamespace(args=args, settings=settings, is_sharded=False, device=torch.device("cuda", 0))
    with forced_capability((7, 5)):
        assert "its kernels need compute capability 8.0" in list(feature.why_not(run))
    with forced_capability((8, 0)):
        assert not any(feature.why_not(run))


def test_the_plan_counts_what_fused_layers_keep() -> None:
    model = tiny_model("qwen3").to(torch.bfloat16)

    def per_token() -> float:
        with packed_attention(model, "sdpa"):
            return sum(
                cost.per_token for cost in layer_costs(model, checkpointable_layers(model), probe_batches(model))
            )

    eager = per_token()
    with fused_layers(model, dtype=torch.bfloat16, autocast=False):
        assert per_token() < 0.75 * eager


def test_a_norm_of_heads_with_a_hook_is_a_tensor_and_others_go_into_the_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen, with_norm = tiny_model("qwen3"), list[Any](), list[bool]()
    rotate = rotary_module.rotary_forward
    monkeypatch.setattr(
        rotary_module, "rotary_forward", lambda *given: (with_norm.append(given[-1] is not None), rotate(*given))[1]
    )
    ids = torch.randint(3, 96, (2, 9))

    def grads() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return gradients(model)

    expected = grads()
    with fused_layers(model, dtype=torch.float32, autocast=False):
        with_norm.clear()  # those of the proof
        assert_gradients_close(grads(), expected, rtol=1e-4, atol_of_all=1e-6)
        norm = model.model.layers[1].self_attn.k_norm
        handle = norm.register_forward_hook(lambda _module, _inputs, out: seen.append(type(out)))
        assert_gradients_close(grads(), expected, rtol=1e-4, atol_of_all=1e-6)
        handle.remove()
        with torch.no_grad():
            model(input_ids=ids, use_cache=True)
    assert with_norm == [True, True, True, False, True, True]
    assert seen == [torch.Tensor]


def test_a_pending_norm_is_the_tensor_to_all_else() -> None:
    norm = tiny_model("qwen3").model.layers[0].self_attn.q_norm
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    pending = PendingNorm(x, norm.weight, NormForm(norm.variance_epsilon, rounds=True, promotes=True))
    tensor = norm(x)
    for other in (
        pending.transpose(1, 2).tensor.transpose(1, 2), pending + 0, 1.0 * pending, torch.cat([pending, pending])[:1],
        pending.transpose(-1, -2).transpose(-1, -2), pending[:], pending.reshape(1, 5, 16).view_as(x),
    ):  # fmt: skip
        assert torch.allclose(other, tensor)
        (grad,) = torch.autograd.grad(other.square().sum(), x, retain_graph=True)
        assert torch.allclose(grad, torch.autograd.grad(norm(x).square().sum(), x)[0], atol=1e-6)

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any) -> Any:
            return given.contiguous()

    with pytest.raises(RuntimeError, match="set fused_layers='off'"):
        Opaque.apply(PendingNorm(x, norm.weight, pending.form))
