"""``fastpack-trl doctor``: what it prints, the memory that it predicts, and every config it cannot run on one line."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

# Here and not inside of a test: the log handlers that they make would keep that test's captured stderr, and fail later.
import datasets  # noqa: F401
import pytest
import torch
import transformers  # noqa: F401
from feature_material import with_reasons
from sft_material import Material, refused
from vision_material import composite

from fastpack_trl.cli import doctor
from fastpack_trl.cli import main as cli
from fastpack_trl.recipe.gpus import GPUS, gpu_of

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> int:
    return cli.main(["doctor", *map(str, arguments)])


def predicted(material: Material, path: Path, *words: object) -> dict[str, Any]:
    """The forecast of a config for GPUs, with other options behind them."""
    file = material.folder / "doctor.json"
    assert run("--config", path, "--gpu", *words, "--json", file) == 0
    return dict(json.loads(file.read_text())["forecast"])


def test_it_names_versions_device_names_and_what_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = {"bitsandbytes": "'fastpack-trl[qlora]'", "liger_kernel": "'fastpack-trl[liger]'", "triton": "triton"}
    for module in packages:
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type] # what Python takes for not installed
    file = tmp_path / "doctor.json"
    assert run("--json", file) == 0
    out, record = capsys.readouterr().out, json.loads(file.read_text())
    assert record["error"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert all(row["there"] for row in record["upstream"])
    assert "found  {0} of {0}; docs/upstream.md says".format(len(record["upstream"])) in out
    lines = [line.split() for line in out.splitlines()]
    assert all([name, *value.split()] in lines for name, value in record["versions"].items())
    missing = {row["name"]: row for row in record["missing"]}
    assert {name: missing[name]["install"] for name in packages} == {n: f"pip install {packages[n]}" for n in packages}
    assert all(f"{row['needed_for']}: {row['install']}" in out for row in missing.values())
    assert packages.keys().isdisjoint(record["versions"])
    assert "found none" not in out, "what is required is installed"


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {k: " ".join(v) for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    assert extras.keys() == doctor.EXTRAS.keys()
    for extra, (module, _) in doctor.EXTRAS.items():
        assert module.partition(".")[0].replace("_", "-") in extras[extra]


def test_a_config_shows_the_report_of_its_trainer(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    file = material.folder / "doctor.json"
    assert run("--config", material.yaml(packed_attention="sdpa"), "--json", file) == 0
    features = json.loads(file.read_text())["config"]["features"]
    assert features["packed_attention"]["path"] == "sdpa"
    assert features["verify_packing"]["path"] == "passed"
    out = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    for name, line in features.items():
        assert f"{name} " in out
        assert line["reason"] in out
    assert not material.out.exists()


def test_unusable_config_is_one_line_and_loses_nothing(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    file, says = material.folder / "doctor.json", "'./nowhere' is not a folder"
    words = ("--config", material.yaml(model_name_or_path="./nowhere"), "--json", file)
    assert says in refused(material, capsys, *words, command="doctor")
    record = json.loads(file.read_text())
    assert says in record["error"]
    assert "versions" in record


def test_without_a_gpu_bf16_is_refused_and_the_doctor_shows_common_gpus(
    material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("transformers.utils.is_torch_bf16_gpu_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = material.yaml(bf16=True, use_cpu=...)
    assert refused(material, capsys, "--config", path).endswith("set use_cpu: true and bf16: false, or run on a GPU")
    assert run("--config", path) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name}\n" in out for name in ("T4", "4090", "A100-40", "H100"))
    assert "no GPU here: name one with --gpu" in out
    assert run("--config", path, "--use_cpu", "true", "--bf16", "false") == 0
    out = capsys.readouterr().out
    assert ("verify_packing" in out, "GPU memory" in out) == (True, False), "as it runs here"


def test_a_forecast_counts_bytes_as_the_model_has_them(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
    model = AutoModelForCausalLM.from_pretrained(material.model)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = predicted(material, material.yaml(dtype="float32"), "24GiB,8.9")["gpus"]["24GiB,8.9"]
    counted = sum(found["parts_gib"][name] for name in ("frozen weights", "trained weights", "gradients", "optimizer"))
    assert counted * 2**30 == pytest.approx(numbers * 4 * 4), "weights, gradients and AdamW's two moments"
    assert found["total_gib"] == pytest.approx(sum(found["parts_gib"].values()))
    assert found["fits"]
    rows = predicted(material, material.yaml(dtype="bfloat16", **lora), "T4", "h100")["gpus"]
    assert rows.keys() == {"T4", "H100"}
    assert rows["T4"]["parts_gib"]["frozen weights"] * 2**30 == pytest.approx(numbers * 2)
    assert all(row["parts_gib"]["activations"] > 0 and row["longest_row"] > 0 for row in rows.values())
    assert run("--config", material.yaml(), "--gpu", "0.0001,8.0") == 0
    assert "a smaller model, or a larger GPU" in capsys.readouterr().out
    assert not material.out.exists()


def test_options_override_a_forecast_with_reasons(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", material.yaml(), "--gpu", "H100") == 0
    out = capsys.readouterr().out
    assert out.startswith("planned with bf16: true, as for a GPU; the config has bf16: false")
    assert "packed_attention  varlen\n" in out
    assert run("--config", material.yaml(), "--gpu", "H100", "--bf16", "false") == 0
    said = "packed_attention  per_document: varlen needs bf16 or fp16, this run computes in float32 (bf16=False?)"
    assert said in capsys.readouterr().out
    figures = []
    for length in (64, 128):
        report = predicted(material, material.yaml(), "H100", "T4", "--bf16", True, "--max_length", length)
        fast, old = capsys.readouterr().out.split("\nT4\n")
        assert "packed_attention  varlen\n" in fast
        assert "packed_attention  per_document: varlen needs compute capability 8.0, this device has 7.5\n" in old
        assert "bf16 is emulated" in old
        figures.append((report["row_tokens"], report["gpus"]["T4"]["parts_gib"]["activations"]))
    (short, few), (long, more) = figures
    assert (long, more > few) == (2 * short, True)


@pytest.mark.parametrize(("family", "tokens"), [("qwen2_5_vl", 8192), ("gemma3", 1024)])
def test_rows_of_images_are_planned_by_their_own_limit(family: str, tokens: int, tmp_path: Path) -> None:
    file, config = tmp_path / "doctor.json", tmp_path / "sft.yaml"
    composite(family).save_pretrained(tmp_path / "model")  # its class is named
    values = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": "any", "max_length": None}
    config.write_text(json.dumps(values | {"output_dir": str(tmp_path / "out"), "image_row_tokens": tokens}))
    words = ["--config", config, "--gpu", "24GiB,8.9", "--per_device_train_batch_size", 2, "--json", file]
    assert run(*words) == 0
    found = json.loads(file.read_text())["forecast"]
    (gpu,) = found["gpus"].values()
    assert (found["row_tokens"], gpu["longest_row"] > tokens) == (2 * tokens, True)
    assert gpu["features"]["vision_rows"] == "on; the tower, whose memory grows with images, is not counted"
    assert gpu["features"]["cuda_graph"] == "on, if it pays off"
    assert run(*words, "--gpu", "1GiB,8.9", "--image_row_tokens", 10**6) == 0
    (gpu,) = json.loads(file.read_text())["forecast"]["gpus"].values()
    assert "image_row_tokens: " in gpu["change"]


def test_a_forecast_follows_the_rules_of_the_features(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, str]:
        path = material.yaml(use_peft=True, lora_r=4)
        return dict(predicted(material, path, "H100", "--bf16", True)["gpus"]["H100"]["features"])

    on = dict.fromkeys(("lora", "fused_layers"), "on")
    assert found() == {"packed_attention": "varlen", **on, "cuda_graph": "on, if it pays off"}
    with_reasons(monkeypatch, "fused_layers", lambda run: iter(["a new rule"]))
    monkeypatch.setattr("fastpack_trl.features.cuda_graph.LEAST_CAPABILITY", (9, 5))
    monkeypatch.setattr("fastpack_trl.features.lora.has_lora", lambda model: False)
    changed = found()
    assert changed["fused_layers"] == "off: a new rule"
    assert changed["cuda_graph"] == "off: needs compute capability 9.5, this device has 9.0"
    assert "lora" not in changed
    monkeypatch.setattr("fastpack_trl.features.cuda_graph.LEAST_CAPABILITY", (9, 0))
    monkeypatch.setattr(
        "fastpack_trl.features.cuda_graph.refusals",
        lambda run: [run.step.activations_left and f"a new rule of memory: {run.step.activation_bytes > 0}"],
    )
    assert found()["cuda_graph"] == "off: a new rule of memory: True"


@pytest.mark.parametrize(
    "own", [{"load_in_4bit": True}, {"load_in_8bit": True}, {"optim": "paged_adamw_8bit"}, {"use_liger_kernel": True}],
    ids=lambda own: next(iter(own.values())),
)  # fmt: skip
def test_a_plan_needs_no_package_of_the_run(material: Material, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bitsandbytes", "liger_kernel"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type] # what Python takes for not installed
    assert run("--config", material.yaml(use_peft=True, lora_r=4, **own), "--gpu", "4090") == 0


@pytest.mark.parametrize(
    ("trainer", "own"),
    [("sft", {"dtype": "float32"}), ("reward", {}), ("kto", {"use_peft": True, "load_in_8bit": True})],
)
def test_a_suggestion_that_cannot_be_made_is_left_out(
    material: Material, own: Any, trainer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = material.yaml(packing=..., packing_strategy=..., assistant_only_loss=..., **own)
    assert run("--config", path, "--trainer", trainer, "--gpu", "0.0001,8.0") == 0
    assert "suggestion        a smaller model, or a larger GPU" in capsys.readouterr().out


def test_several_gpus_have_a_column_per_engine(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for words in (["--gpus", 4], ["--accelerate_config", "fsdp2", "--num_processes", 4]):
        tables.append(predicted(material, material.yaml(), "H100", "h200", *words))
        out = capsys.readouterr().out
        assert "4 x H100, DDP  4 x H100, FSDP 2  4 x H200, DDP  4 x H200, FSDP 2" in out
    assert tables[0] == tables[1]
    assert run("--config", material.yaml(), "--gpus", 4) == cli.EXIT_USER_ERROR
    assert "--gpus=4 must be >= 1 and needs a kind of GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("H100", ["h100", "NVIDIA H100 80GB HBM3"]), ("4090", ["RTX 4090"]), ("T4", ["Tesla T4"]),
        ("A100", ["NVIDIA A100-SXM4-80GB", "A100-80"]), ("A100-40", ["A100-40GB"]),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_names_that_people_write(name: str, texts: list[str]) -> None:
    assert [gpu_of(text) for text in texts] == [GPUS[name]] * len(texts)
