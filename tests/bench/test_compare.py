"""`compare` and ``fastpack-trl bench``: watched sides of a user's run, the gate, their table, JSON and picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import build as build_method
from sft_material import Material
from torch import nn
from trainer_material import make_dataset, make_tokenizer, settings
from trl import SFTTrainer

from fastpack_trl.bench import compare as gate
from fastpack_trl.bench.command import settings_of
from fastpack_trl.bench.compare import LossParityError, check_losses, compare, compare_sides, table, tolerance
from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.picture import draw
from fastpack_trl.bench.sides import LONG_RUN, train_side
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS, SideResult, Watch, covered, run_side, without_dropout
from fastpack_trl.cli import main as cli
from fastpack_trl.errors import UserError
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.recipe.arguments import parse
from fastpack_trl.recipe.methods import METHODS, SFT
from fastpack_trl.testing import tiny_model

Build = Callable[..., Any]


def _build(folder: Path, data: Any = None, change: Callable[[Any], Any] = lambda trainer: None, **more: Any) -> Build:
    """Packed rows, two micro-batches of one row per step."""
    own = settings(folder, packing=True, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    own |= {"eval_strategy": "no", "max_steps": LONG_RUN} | more
    del own["eval_steps"]

    def build(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        trainer = trainer_class(
            tiny_model("qwen3"), args=config_class(**(own | changes)), train_dataset=data or make_dataset("text"),
            processing_class=make_tokenizer(),
        )  # fmt: skip
        change(trainer)
        return trainer

    return build


def _run(folder: Path, side: str, **more: Any) -> SideResult:
    classes = SFT.of_trl if side == "stock" else SFT.classes
    return run_side(partial(_build(folder, **more), *classes), Watch(warmup=2, timed=2, gate=2))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sides = ("stock", "fastpack", "fastpack_plan")
    return compare(_build(tmp_path_factory.mktemp("compare")), timed=2, warmup=2, sides=sides, progress=False)


def test_every_side_has_its_figures_and_the_same_losses(record: dict[str, Any]) -> None:
    (row,) = record["rows"]
    stock, ours, plan = row["sides"].values()
    assert row["gate"] == {"figure": "loss", "dtype": "float32", "tolerance": 1e-5, "steps": 2}
    for side in (stock, ours, plan):
        assert len(side["seconds"]["values"]) == 2 * 2
        assert side["tokens_per_second"] > 0
        assert side["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert side["setting"] == "qwen3, 2 layers of 32, checkpointing, 1 x 2 rows per step, max_length 48"
    pairs = [pair for side in (ours, plan) for pair in zip(side["losses"][2:], stock["losses"][2:], strict=True)]
    assert 0 <= row["loss_difference"] == max(abs(a - b) / b for a, b in pairs) < 1e-5
    assert 0 == ours["host_syncs"] < stock["host_syncs"]
    assert json.loads(json.dumps(record)) == record
    lines = table(record).splitlines()
    assert lines[1].startswith("losses agree within 1e-05 (float32) in the first 2 steps; largest difference in later")
    assert [line.split()[0] for line in lines[2:6]] == ["side", *row["sides"]]
    assert max(map(len, lines[1:6])) <= 110


def test_the_picture_shows_every_side(record: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(record, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    times, rates, losses = figure.axes
    sides = record["rows"][0]["sides"]
    assert [label.get_text().replace("\n", "_") for label in times.get_xticklabels()] == [*sides]
    assert len(rates.patches) == 3
    drawn = {line.get_label(): list(line.get_ydata()) for line in losses.get_lines()}
    assert drawn == {name: side["losses"] for name, side in sides.items()}


def test_a_watch_records_each_step_as_the_log_has_it_and_ends_the_run(tmp_path: Path) -> None:
    trainer, waiting = _build(tmp_path, logging_steps=3)(*SFT.classes), [True] * 2
    watch = Watch(warmup=2, timed=3, settling=1, profiled=2, kernels=str(tmp_path / "kernels"), count_syncs=True)
    pending = property(lambda _: bool(waiting and waiting.pop()))
    reduce = type("Reduce", (), {"is_pending": pending, "after": lambda self, model: nullcontext()})()
    around = patch_attribute(trainer.fastpack_run, "reduce", reduce)
    found = run_side(lambda: trainer, watch, around=lambda _: around)
    assert trainer.state.global_step == 4 + 3 + 2 + 1  # warmed up in step 3, and one step more
    assert (found.warmup_steps, len(found.seconds)) == (4, 3)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert found.losses == [entry["loss"] for entry in logs]
    assert found.grad_norms == [entry["grad_norm"] for entry in logs]
    assert found.tokens == logs[6]["num_tokens"] - logs[3]["num_tokens"] > 0
    assert 0 < found.first_step_seconds < found.warmup_seconds
    assert found.profile["launches"] == found.host_syncs == 0  # on the CPU, and of our trainer
    assert "aten::" in (tmp_path / "kernels").read_text()
    assert found.peak_gib is found.reserved_gib is None
    assert SideResult(**json.loads(json.dumps(asdict(found)))) == found


def test_a_build_that_ignores_its_arguments_and_wrong_steps_are_named(tmp_path: Path) -> None:
    build = _build(tmp_path, max_steps=3)
    for name, wrong in {"timed": 0, "warmup": -1, "rounds": 0, "gate_steps": -1}.items():
        with pytest.raises(UserError, match=f"{name}={wrong}.*: rounds and timed must be >= 1"):
            compare(build, progress=False, **{name: wrong})
    with pytest.raises(UserError, match=r"build ignored max_steps=10000 .*config_class"):
        compare(lambda trainer_class, config_class, **_: build(trainer_class, config_class), progress=False)
    with pytest.raises(UserError, match="first argument's type, FastSFTTrainer; it returned SFTTrainer"):
        compare(lambda _, config_class, **changes: build(SFTTrainer, config_class, **changes), progress=False)
    with pytest.raises(UserError, match=r"side 'fastpak' does not exist; did you mean 'fastpack'"):
        compare(build, sides=("stock", "fastpak"), progress=False)


def _scaled(by: float) -> Callable[[Any], Any]:
    """Another model: the outputs of its last norm are scaled."""
    return lambda trainer: trainer.model.model.norm.register_forward_hook(lambda _module, _inputs, hidden: hidden * by)


def _raising(error: BaseException) -> Callable[[Any], Any]:
    def fail(_trainer: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"change": _scaled(1.01)}, LossParityError, "the loss of step 1 is .* with fastpack but .* with stock"),
        ({"change": _scaled(float("nan"))}, LossParityError, "the loss of step 1 is nan with fastpack"),
        ({"data": make_dataset("text").shuffle(1)}, LossParityError, "must get the same data in the same order"),
        ({"change": _raising(RuntimeError("no kernel"))}, UserError, "cannot be trained: RuntimeError: no kernel"),
        ({"max_steps": 1}, UserError, "stopped early, after 1 step"),
    ],
)
def test_nothing_is_compared_if_our_side_differs_or_fails(
    tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    runs = {"stock": partial(_run, tmp_path, "stock"), "fastpack": partial(_run, tmp_path, "fastpack", **more)}
    with pytest.raises(error, match=message):
        compare_sides(runs, progress=False)


def test_a_side_without_memory_or_compiler_is_named_and_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    stock, ours = partial(_run, tmp_path, "stock"), partial(_run, tmp_path, "fastpack")
    small = partial(stock, change=_raising(torch.OutOfMemoryError("CUDA out of memory")))
    broken = partial(stock, change=_raising(RuntimeError("no kernel")))
    found = compare_sides({"stock": small, "stock_compiled": broken, "fastpack": ours}, progress=False)
    assert "OutOfMemoryError" in found["sides"]["stock"]["failed"]
    assert found["sides"]["stock_compiled"]["failed"] == "RuntimeError: no kernel"
    interrupted = partial(ours, change=_raising(KeyboardInterrupt()))
    found = compare_sides({"stock": stock, "fastpack": interrupted}, progress=False)
    assert not found["complete"]
    assert set(found["sides"]) == {"stock"}
    with pytest.raises(UserError, match="no side could be measured"):
        compare_sides({"stock": small, "fastpack": small}, progress=False)


@pytest.mark.parametrize(
    ("dtype", "apart", "passes"),
    [
        ("float32", 0.9e-5, True), ("float32", 2e-5, False), ("bfloat16", 0.007, True), ("bfloat16", 0.009, False),
        ("float16", 0.002, False), ("float32", float("nan"), False),
    ],
)  # fmt: skip
def test_the_tolerance_is_that_of_the_dtype(dtype: str, apart: float, passes: bool) -> None:
    for figure, more in ((LOSS, 1), (GRADIENT_NORM, 10)):
        values = [[4.0], [4.0 * (1 + more * apart)]]
        first, own = (SideResult(losses=v, grad_norms=list(v), dtype=dtype, compares=figure) for v in values)
        if passes:
            check_losses("stock", first, "fastpack", own, 1)
            continue
        message = f"the {figure} of step 1 .* more than {tolerance(dtype, figure):.0e}"
        with pytest.raises(LossParityError, match=message):
            check_losses("stock", first, "fastpack", own, 1)


def test_the_gate_stops_a_learner_with_another_model(tmp_path: Path) -> None:
    """Its loss would not: advantages sum to zero, and the ratio of a model to itself is one."""

    def make(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        fast = trainer_class.__name__.startswith("Fast")
        options = {"config": config_class, "beta": 0.0, "bf16": False, **changes}
        trainer = build_method("GRPO", tmp_path, fast=fast, model=tiny_model("qwen3"), **options)
        if fast and is_wrong:
            with torch.no_grad():
                trainer.model.get_base_model().lm_head.weight.mul_(1.01)
        return trainer

    steps: Any = {"warmup": 1, "timed": 1, "gate": 1, "seed": 0}
    runs = {name: partial(train_side, make, name, METHODS["grpo"], **steps) for name in ("stock", "fastpack")}
    is_wrong = False
    row = compare_sides(runs, rounds=1, gate=1, progress=False)
    assert row["gate"]["figure"] == "gradient norm"
    assert gate.losses_line(row).startswith("random completions and rewards; gradient norms agree")
    is_wrong = True
    with pytest.raises(LossParityError, match="the gradient norm of step 1"):
        compare_sides(runs, rounds=1, gate=1, progress=False)


def test_tokens_of_steps_that_generate_nothing_are_those_before(tmp_path: Path) -> None:
    make = partial(build_method, "GRPO", tmp_path, fast=False, num_iterations=2, max_steps=20, logging_steps=1)
    assert (run_side(make, Watch(warmup=3, timed=3), around=learner_alone).tokens or 0) > 0


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_completions_are_those_of_the_step_and_gone_afterwards(tmp_path: Path, name: str) -> None:
    trainer = build_method(name, tmp_path, fast=False, max_completion_length=20)
    prompts: Any = [[5, 6, 7]] * 40
    own, made = dict(vars(trainer)), []
    with learner_alone(trainer):
        for trainer._step in (0, 0, 1):
            completions = trainer._generate_single_turn(prompts, None, {}, *[4] * (name == "GRPO"))
            completions = completions[0] if name == "GRPO" else completions  # without log-probabilities
            made.append((completions, trainer._calculate_rewards([], prompts, [], []).tolist()))
    assert made[0] == made[1]
    assert all(first != second for first, second in zip(made[0], made[2], strict=True))
    assert {len(each) for each in made[0][0]} <= set(range(3, 21))
    tokenizer = make_tokenizer()
    special = set(tokenizer.all_special_ids)
    assert all(each[-1] == tokenizer.eos_token_id and not special & set(each[:-1]) for each in made[0][0])
    assert {**vars(trainer), "_step": own["_step"]} == own


def test_dropout_is_off_inside_and_back_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Dropout(0.0))
    model[0].attention_dropout = 0.1
    with without_dropout(model):
        assert (model[1].p, model[0].attention_dropout) == (0.0, 0.0)
    assert (model[1].p, model[2].p, model[0].attention_dropout) == (0.3, 0.0, 0.1)


def test_quartiles_are_between_the_values_and_streams_that_overlap_count_once() -> None:
    assert gate.quartiles([3, 1, 2]) == {"median": 2, "q1": 1.5, "q3": 2.5, "values": [3, 1, 2]}
    assert gate.quartiles([4.0])["q1"] == gate.quartiles([4.0])["q3"] == 4.0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_yaml_is_measured_in_processes_with_overrides(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = material.folder / "out.json", material.folder / "out.png"
    words = ["bench", "--config", str(material.yaml(eval_on_start=True))]
    words += ["--json", str(file), "--plot", str(picture)]
    words += ["--rounds", "1", "--steps", "1", "--warmup", "0", "--gate-steps", "1", "--seed", "3"]
    assert cli.main([*words, "--gradient_accumulation_steps", "2", "--max_length=48"]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert (record["complete"], record["settings"]["seed"]) == (True, 3)
    assert row["sides"]["stock"]["setting"].endswith("2 rows per step, max_length 48")
    assert row["gate"]["tolerance"] == 1e-5
    assert list(row["sides"]) == ["stock", "fastpack"]
    config = record["settings"]["config"]
    assert (config["max_length"], config["model_name_or_path"]) == (48, "model")
    assert str(material.folder) not in file.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert "losses agree within 1e-05" in out
    assert out.splitlines()[-1] == f"picture: {picture}"
    assert picture.stat().st_size > 10_000
    assert not (material.folder / "out").exists()


def test_a_record_names_no_path_and_no_token(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    text = (
        "model_name_or_path: /data/mé/Qwen3-8B\nhub_token: hf_x\nenv: {WANDB_API_KEY: abc}\nuse_cpu: true\nbf16: no\n"
        "model_init_kwargs: {token: hf_x, config: {api_key: hf_x, image_row_tokens: 3, files: [/home/me/c.json]}}\n"
    )
    file.write_text(text, encoding="utf-8")
    flags = ["--dataset-name=trl-lib/Capybara", "--packing", "--run_name", "mine"]
    found = settings_of(parse(["--config", str(file), *flags]), str(file), flags)
    wanted = {"model_name_or_path": "Qwen3-8B", "dataset_name": "Capybara", "packing": True}
    wanted |= {"model_init_kwargs": {"config": {"image_row_tokens": 3, "files": ["c.json"]}}}
    assert found == wanted | {"use_cpu": True, "bf16": False}


@pytest.mark.cuda
def test_on_a_gpu_memory_kernels_and_idle_time_are_there(tmp_path: Path) -> None:
    build = _build(tmp_path, use_cpu=False, bf16=True)
    found = compare(build, timed=3, sides=("stock", "fastpack", "fastpack_plan"), progress=False)
    for name, side in found["rows"][0]["sides"].items():
        assert "failed" not in side, (name, side)
        assert 0 < side["peak_gib"] <= side["reserved_gib"] < 1
        assert side["profile"]["launches"] > 0
        assert side["profile"]["busy_seconds"] > 0
