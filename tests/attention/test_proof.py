"""The packing proof sees each kind of leak, and its outcome decides how a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sft_material import Material
from torch import nn
from trainer_material import assert_same_log, build, figures, train
from transformers import AutoTokenizer
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import install as seam
from fastpack_trl.attention import start_proof
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.cli.main import main as cli
from fastpack_trl.errors import NonFiniteError, PackingError
from fastpack_trl.model import facts as model_features
from fastpack_trl.testing import FAMILIES, tiny_model

OFF = {"packed_attention": "off"}


def widened(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """Every window is another one for our path; stock makes its masks as before."""
    right = model_features.window_of

    def wrong(module: nn.Module) -> int | None:
        window = right(module)
        return None if window is None else window + by

    monkeypatch.setattr(model_features, "window_of", wrong)
    monkeypatch.setattr(seam, "window_of", wrong)


@pytest.mark.parametrize(
    ("device", "dtype", "family", "window"),
    [
        ("cpu", dtype, family, window)
        for dtype in (torch.float32, torch.bfloat16)
        for family, window in (("mistral", 5), ("gpt_oss", 40))
    ]
    + [
        pytest.param("cuda", torch.bfloat16, family, window, marks=pytest.mark.cuda)
        for family, window in (("gpt_oss", 128), ("gemma3_text", 512), ("mistral", 1024))
    ],
)
def test_a_window_that_is_one_off_fails_the_proof(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, family: str, window: int
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    sizes = {"max_position_embeddings": 2048, "hidden_size": 64, "head_dim": 16} if device == "cuda" else {}
    model = tiny_model(family, sliding_window=window, **sizes).to(device, dtype)
    for implementation in ("auto", "per_document", "sdpa") if device == "cuda" else ("auto",):
        proof = verify_packing(model, implementation=implementation)
        assert proof.proven, (implementation, str(proof))
        assert not proof.not_exercised
    for by in (-1, 1):
        with monkeypatch.context() as patch:
            widened(patch, by)
            # 1,025 is past what is exercised; asked for by its lengths, it is all the same.
            proof = verify_packing(model, lengths=(9, window + 16, 6) if device == "cuda" else None)
        assert not proof.proven
        assert {(seen, right) for _, seen, right in proof.windows} == {(window + by, window)}
        assert f"sees {window + by}, not {window}" in str(proof)
        if dtype == torch.float32:  # below, rounding is larger than what one token more or less changes
            assert proof.budget is not None
            assert proof.difference > 10 * proof.budget


def test_windows_up_to_512_tokens_are_exercised_on_the_cpu() -> None:
    for family, window in (("gpt_oss", 128), ("gemma3_text", 512)):
        proof = verify_packing(tiny_model(family, sliding_window=window, max_position_embeddings=1024))
        assert proof.proven
        assert not proof.not_exercised
        assert max(proof.past_window) > window + 1
    proof = verify_packing(tiny_model("mistral", sliding_window=513, max_position_embeddings=1024))
    assert (proof.proven, proof.not_exercised, proof.past_window) == (True, ("window 513",), ())
    # A document of the model's own positions never exceeds this one.
    assert verify_packing(tiny_model("mistral", sliding_window=120)).not_exercised == ("window 120",)


def test_a_probe_that_costs_too_much_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack_trl.attention import probe

    monkeypatch.setattr(probe, "_MOST_OPERATIONS", {"cpu": 1e6})
    assert verify_packing(tiny_model("mistral", sliding_window=40)).not_exercised == ("window 40",)


def test_no_logits_are_made_but_of_the_last_token() -> None:
    model = tiny_model("gpt_oss", sliding_window=40)
    rows, head = [], model.lm_head.forward

    def counted(hidden: torch.Tensor) -> Any:
        rows.append(hidden.shape[1])
        return head(hidden)

    model.lm_head.forward = counted
    verify_packing(model)
    assert set(rows) == {1}


def test_hooks_of_the_user_see_nothing_of_the_proof(tmp_path: Path) -> None:
    model, seen = tiny_model("mistral"), []
    handles = [
        model.model.layers[0].register_forward_hook(lambda *_: seen.append("forward")),
        model.model.layers[1].mlp.register_full_backward_hook(lambda *_: seen.append("backward")),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("global")),
    ]
    try:
        assert verify_packing(model).proven
        assert not seen
        train(FastSFTTrainer, tmp_path, model=model, packing=True, max_steps=1, eval_strategy="no")
        assert set(seen) == {"forward", "backward", "global"}
        assert seen.count("forward") == 1, "in the step alone"
    finally:
        for handle in handles:
            handle.remove()


def spoilt(model: Any, name: str, value: float) -> Any:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    message = rf"parameter {name} has non-finite values: 1 of 1,536"
    with pytest.raises(NonFiniteError, match=message):
        verify_packing(spoilt(tiny_model("qwen3"), name, value))
    options: dict[str, Any] = {"packing": True, "max_steps": 1, "eval_strategy": "no"}
    ours = train(FastSFTTrainer, tmp_path, model=spoilt(tiny_model("qwen3"), name, value), **options)
    line = ours.fastpack_report["verify_packing"]
    assert (line.status, line.path) == ("off", "not run")
    assert name in line.reason
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert name in caplog.text
    with pytest.raises(ValueError, match=f"verify_packing='on': {message}"):
        train(
            FastSFTTrainer, tmp_path, model=spoilt(tiny_model("qwen3"), name, value), fast={"verify_packing": "on"},
            **options,
        )  # fmt: skip


def test_packing_under_stock_is_proven_and_a_leak_stops(tmp_path: Path) -> None:
    right = train(FastSFTTrainer, tmp_path, packing=True, fast=OFF)
    assert right.fastpack_report["verify_packing"].path == "proof of stock"
    assert right.fastpack_report["verify_packing"].reason.startswith("proven")
    leaking: dict[str, Any] = {"family": "gpt_oss", "packing": True, "max_steps": 1, "eval_strategy": "no"}
    with pytest.raises(
        PackingError, match=r"proof with stock: LEAK.*set packed_attention='auto'; verify_packing='off'"
    ):
        train(FastSFTTrainer, tmp_path, fast=OFF, **leaking)
    with pytest.raises(PackingError, match=r"LEAK.*torch_compile=True compiles.*leave that out, or set packing=False"):
        train(FastSFTTrainer, tmp_path, torch_compile=True, torch_compile_backend="eager", **leaking)
    insisted = train(FastSFTTrainer, tmp_path / "ours", fast={**OFF, "verify_packing": "off"}, **leaking)
    stock = train(SFTTrainer, tmp_path / "stock", **leaking)
    assert figures(insisted) == figures(stock)
    assert insisted.fastpack_report["verify_packing"].reason == "switched off"


def test_a_leak_is_one_line_of_the_command(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    folder = material.folder / "gpt_oss"
    tiny_model("gpt_oss", vocab_size=304).save_pretrained(folder)
    AutoTokenizer.from_pretrained(material.model).save_pretrained(folder)
    config = material.yaml(model_name_or_path=str(folder), packed_attention="off", max_steps=1)
    assert cli(["sft", "--config", str(config)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fastpack-trl sft: error: ")]
    assert "packing proof with stock: LEAK" in line
    assert line.endswith("set packed_attention='auto'; verify_packing='off' trains all the same")
    assert not material.out.exists()
    assert cli(["sft", "--config", str(config), "--verify_packing", "off"]) == 0


def test_disable_trains_as_stock_whatever_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_DISABLE", "1")
    train(FastSFTTrainer, tmp_path, family="gpt_oss", packing=True, max_steps=1, eval_strategy="no", fast=OFF)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3 4-bit"])
def test_a_small_copy_leaks_under_stock_where_the_model_does(family: str) -> None:
    """It stands for a model whose parameters are in other processes."""
    two = tiny_model(family.split()[0]).config
    each = {name: value * 3 for name, value in vars(two).items() if isinstance(value, list) and len(value) == 2}
    model = tiny_model(family.split()[0], num_hidden_layers=6, **each)

    def leaks(one: Any) -> Any:
        try:
            return {pair[:2] for pair in verify_packing(one, implementation="off").leaks}
        except ValueError as error:
            return str(error)

    if family.endswith("4-bit"):
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    state = torch.get_rng_state()
    with start_proof.small_copy(model, torch.device("cpu"), None) as copy:
        assert leaks(copy) == leaks(model)
        assert copy.config.get_text_config().num_hidden_layers < 6
        kinds = set(getattr(model.config, "layer_types", None) or ())
        assert set(getattr(copy.config, "layer_types", None) or ()) == kinds
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_parameters_that_are_in_other_processes_are_checked_on_a_small_copy(tmp_path: Path, family: str) -> None:
    trainer: Any = build(FastSFTTrainer, tmp_path, family=family, packing=True, eval_strategy="no", fast=OFF)
    trainer.is_fsdp_enabled = True
    if family == "qwen3":
        start_proof.prove_stock(trainer.fastpack_run)
        assert trainer.fastpack_report["verify_packing"].reason.startswith("proven")
    else:
        with pytest.raises(PackingError, match=r"LEAK: .*set packed_attention='auto'"):
            start_proof.prove_stock(trainer.fastpack_run)


@pytest.mark.parametrize("name", ["eager", "sdpa", "loaded"])
def test_an_implementation_that_was_asked_for_runs_what_is_not_packed(tmp_path: Path, name: str) -> None:
    """Packed rows run ours over it: asked for, stock's own leaks in gpt_oss."""
    options: dict[str, Any] = {"model": tiny_model("qwen3", attn_implementation="eager"), "packing": True}
    if name != "loaded":
        tiny_model("gpt_oss" if name == "eager" else "qwen3").save_pretrained(tmp_path / "model")
        options["model"] = str(tmp_path / "model")
        options["model_init_kwargs"] = {"attn_implementation": name, "dtype": "float32"}
    ours = train(FastSFTTrainer, tmp_path / "ours", **options)
    line = ours.fastpack_report["packed_attention"]
    assert (line.status, line.path) == ("on", "per_document")
    used = "sdpa" if name == "sdpa" else "eager"
    if name != "eager":
        assert f"batches that are not packed run attn_implementation={used!r}" in line.reason
    if name == "sdpa":
        assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", **options))
    assert ours.fastpack_proof is not None
    assert ours.fastpack_proof.proven
    assert ours.model.config._attn_implementation == used


def test_a_collator_of_ones_own_is_warned_of_where_stocks_rows_leak(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own:
        """Neither stock's collator nor a kind of it: what it tells the model is not known."""

        def __init__(self) -> None:
            self.stock = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

        def __call__(self, rows: Any) -> Any:
            return self.stock(rows)

    class Kind(DataCollatorForLanguageModeling):
        pass

    def trained_with(collator: Any) -> None:
        trainer = build(FastSFTTrainer, tmp_path, family="gpt_oss", packing=True, max_steps=1, eval_strategy="no")
        trainer.data_collator = collator  # TRL takes none at construction where rows are packed
        trainer.train()

    trained_with(Own())
    assert "what Own makes of them is not examined" in caplog.text
    with pytest.raises(PackingError, match="custom data collator Kind"):
        trained_with(Kind(pad_token_id=0, padding_free=True))


def test_a_collator_that_makes_a_packed_row_one_document_stops_or_trains_as_in_stock(tmp_path: Path) -> None:
    def trained(cls: Any, **more: Any) -> Any:
        trainer = build(cls, tmp_path / cls.__name__, packing=True, eval_strategy="no", **more)
        trainer.data_collator = DataCollatorForLanguageModeling(pad_token_id=0)
        trainer.train()
        return trainer

    with pytest.raises(PackingError, match=r"LEAK: every row is one document .* padding_free=False"):
        trained(FastSFTTrainer)
    ours = trained(FastSFTTrainer, fast={"verify_packing": "off"})
    assert_same_log(ours, trained(SFTTrainer))
