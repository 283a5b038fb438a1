"""``fastpack-trl sft`` with the real parser, a real model and real steps on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from ranks import torchrun
from sft_material import TEXT_ROWS, Material, refused, write_jsonl
from trainer_material import callback
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DatasetMixtureConfig, ScriptArguments

from fastpack_trl.cli.main import main
from fastpack_trl.cli.train import _what_next
from fastpack_trl.errors import UserError
from fastpack_trl.recipe import train
from fastpack_trl.recipe.arguments import parse
from fastpack_trl.recipe.data import load_data
from fastpack_trl.recipe.methods import METHODS
from fastpack_trl.testing import tiny_model


def run(*argv: object) -> Any:
    """Train in this process; the trainer."""
    return train.train([str(word) for word in argv])


def test_steps_on_a_stream_save_a_model_that_loads_without_us(material: Material) -> None:
    assert run("--config", material.yaml(dataset_streaming=True, max_steps=2)).state.global_step == 2
    model = AutoModelForCausalLM.from_pretrained(material.out)
    assert (model.config.model_type, type(model).__module__.partition(".")[0]) == ("qwen3", "transformers")
    assert AutoTokenizer.from_pretrained(material.out).pad_token == "<pad>"


def test_a_run_ends_with_its_speed_the_report_and_commands_that_run(
    material: Material, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next commands are of the command alone: `train` in another program does not name them."""
    monkeypatch.chdir(material.folder)
    run("--config", material.yaml())
    last, report = capsys.readouterr().out.splitlines()[-1], material.out / "fastpack_report.json"
    wanted = rf"loss [\d.]+ -> [\d.]+; [\d,]+ tokens/s.*; nothing fell back to TRL; report: {report}"
    assert re.fullmatch(wanted, last), last
    path = material.yaml(use_peft=True, lora_r=4, output_dir="my out", save_report="off", packing_strategy="wrapped")
    assert main(["sft", "--config", str(path)]) == 0
    end, said = capsys.readouterr().out.splitlines()[-2:]
    assert re.search(r"; run by TRL: .*batches", end), end
    assert "report" not in end
    assert said == "next: fastpack-trl generate 'my out' --prompt 'Hello' or fastpack-trl merge 'my out'"
    for command in said.removeprefix("next: ").split(" or "):
        assert main(shlex.split(command)[1:]) == 0


@pytest.mark.parametrize(
    ("command", "flags", "says"),
    [
        ("sft", "--config four.yaml", "fastpack-trl merge out --config four.yaml --base m"),
        ("sft", "--config none.yaml --load_in_4bit true", "fastpack-trl merge out --load_in_4bit"),
        ("reward", "", "fastpack-trl merge out"),
    ],
)
def test_what_comes_next_knows_quantized_bases_and_scores(
    material: Material, monkeypatch: pytest.MonkeyPatch, command: str, flags: str, says: str
) -> None:
    monkeypatch.chdir(material.folder)
    Path("four.yaml").write_text("load_in_4bit: true", encoding="utf-8")
    Path("none.yaml").write_text("seed: 1", encoding="utf-8")
    words = f"{flags} --model_name_or_path m --dataset_name d --output_dir out --use_cpu true --bf16 false".split()
    arguments = parse(words, METHODS[command])
    assert _what_next(arguments) == "", "nothing is saved"
    Path("out").mkdir()
    Path("out/adapter_config.json").touch()
    assert _what_next(arguments).split(" or ")[-1] == says
    assert ("generate" in _what_next(arguments)) == (command == "sft")


def make_data(kind: str, folder: Path) -> Path:
    """The rows of `TEXT_ROWS` in another form."""
    data, path = Dataset.from_list([dict(row) for row in TEXT_ROWS]), folder / f"data.{kind}"
    match kind:
        case "json.gz":
            path.write_bytes(gzip.compress(write_jsonl(folder / "plain").read_bytes()))
        case "json":
            path.write_text(json.dumps(TEXT_ROWS), encoding="utf-8")
        case "csv" | "csv.gz":
            data.to_pandas().to_csv(path, index=False)
        case "parquet":
            data.to_parquet(path)
        case "txt":
            path.write_text("\n".join(data["text"]), encoding="utf-8")
        case "pattern":
            write_jsonl(folder / "part-0.jsonl", TEXT_ROWS[:16])
            write_jsonl(folder / "part-1.jsonl", TEXT_ROWS[16:])
            return folder / "part-*.jsonl"
        case "folder":
            write_jsonl(path / "train.jsonl")
        case "saved":
            data.save_to_disk(path)
        case "saved splits":
            DatasetDict({"train": data, "test": data.select(range(4))}).save_to_disk(path)
    return path


KINDS = ["json", "json.gz", "csv", "csv.gz", "parquet", "txt", "pattern", "folder", "saved", "saved splits"]


@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_local_form_gives_the_same_rows(material: Material, kind: str, streaming: bool) -> None:
    name = str(make_data(kind, material.folder))
    by_name = load_data(ScriptArguments(dataset_name=name, dataset_streaming=streaming), DatasetMixtureConfig())
    mixture = DatasetMixtureConfig(datasets=[{"path": name}], streaming=streaming)
    for splits in (by_name, load_data(ScriptArguments(), mixture)):
        assert [row["text"] for row in splits["train"]] == [row["text"] for row in TEXT_ROWS]
    assert kind != "saved splits" or len(list(by_name["test"])) == 4


def test_a_mixture_of_a_local_file_and_a_builder_trains(material: Material) -> None:
    entries = [{"path": str(material.data)}, {"path": "json", "data_files": str(material.data), "split": "train[:4]"}]
    path = material.yaml(dataset_name=..., datasets=entries, test_split_size=0.25, eval_strategy="steps", eval_steps=3)
    trainer = run("--config", path)
    assert trainer.state.global_step == 3
    assert any("eval_loss" in row for row in trainer.state.log_history)


def test_rows_that_are_split_off_are_the_same_in_each_run(material: Material, caplog: pytest.LogCaptureFixture) -> None:
    mixture = DatasetMixtureConfig(datasets=[{"path": str(material.data)}], test_split_size=4.0)
    first, second = (load_data(ScriptArguments(dataset_name="other.jsonl"), mixture)["test"][:] for _ in range(2))
    assert first == second
    assert len(first["text"]) == 4
    assert "dataset_name='other.jsonl' is not read, because `datasets` is set" in caplog.text


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("packed_attention: off", "packed_attention", "off"),
        ("verify_packing: on", "verify_packing", "on"),
        ("--packed_attention off", "packed_attention", "off"),
        ("packed_attention: off --packed-attention sdpa", "packed_attention", "sdpa"),
        ("learning_rate: 2e-4", "learning_rate", 2e-4),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("packing: 'true'", "packing", True),
        ("max_length: null", "max_length", None),
        ("run_name: 2024", "run_name", "2024"),
        ("report_to: [none]", "report_to", []),
        ("packing: null", "packing", False),
        ("lr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs", {"num_cycles": 2}),
        ("run_name: 2024-01-02", "run_name", "2024-01-02"),
        ("learning_rate: 2e-4 --learning_rate 1e-3", "learning_rate", 1e-3),
    ],
)
def test_spellings_of_values(material: Material, text: str, field: str, value: object) -> None:
    line, dashes, flags = text.partition("--")
    without = {"max_steps": ..., "learning_rate": ..., "packing": ..., "max_length": ..., "report_to": ...}
    arguments = parse(["--config", str(material.yaml(text=f"{line}\n", **without)), *f"{dashes}{flags}".split()])
    assert getattr(arguments.training, field) == value


def test_env_is_set_and_launch_options_are_split_off(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_TEST_NAME", "before")
    text = "env: {FASTPACK_TEST_NAME: 7}\nnum_processes: 2\nmulti_gpu: true\nquiet: false\naccelerate_config: zero2\n"
    path = str(material.yaml(text=text))
    flags = "--mixed_precision=no --main_process_port 29511 --multi_gpu --packing --accelerate-config zero3"
    arguments = parse([f"--config={path}", *flags.split()])
    assert os.environ["FASTPACK_TEST_NAME"] == "7"
    files = [Path(word.partition("=")[2]).name for word in arguments.launch if word.startswith("--config_file=")]
    assert files == ["zero2.yaml", "zero3.yaml"], "accelerate takes the last: the flag wins"
    assert [word for word in arguments.launch if not word.startswith("--config_file=")] == [
        "--num_processes=2", "--multi_gpu", "--mixed_precision=no", "--main_process_port", "29511", "--multi_gpu",
    ]  # fmt: skip
    assert arguments.training.packing


def test_an_error_of_a_step_keeps_its_traceback(material: Material) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("raised by a step")

    with pytest.raises(ValueError, match="raised by a step") as caught:
        train.train(["--config", str(material.yaml())], callbacks=[callback("on_step_end", fail)()])
    assert not isinstance(caught.value, UserError)


@pytest.mark.slow
def test_two_processes_under_torchrun(material: Material) -> None:
    config = material.yaml(save_strategy="steps", save_steps=3)
    torchrun("-m", "fastpack_trl", "sft", "--config", str(config))
    training = torch.load(material.out / "training_args.bin", weights_only=False)
    assert training.world_size == 2
    # Each process keeps its own random state: two files for two processes.
    states = sorted(path.name for path in (material.out / "checkpoint-3").glob("rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_launch_options_start_accelerate_and_its_exit_code_is_ours(
    material: Material, capfd: pytest.CaptureFixture[str]
) -> None:
    # The pad token shows that the launched process, not this one, found the error.
    path = material.yaml(text="num_processes: 1\nmixed_precision: 'no'\n", pad_token="<nowhere>")
    assert "`pad_token` ('<nowhere>')" in refused(material, capfd, "--config", path)
    words = ["--pad_token", "<pad>", "--accelerate_config", "single_gpu", "--mixed_precision", "no", "--max_steps", "1"]
    assert main(["sft", "--config", str(path), *words]) == 0
    assert f"Model saved to {material.out}" in capfd.readouterr().out


def test_leak_of_packed_rows_is_one_line_with_the_fix(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    folder = material.folder / "gpt_oss"
    tiny_model("gpt_oss", vocab_size=304).save_pretrained(folder)
    AutoTokenizer.from_pretrained(material.model).save_pretrained(folder)
    config = material.yaml(model_name_or_path=str(folder), packed_attention="off", max_steps=1)
    line = refused(material, capsys, "--config", config)
    assert "packing check with stock: LEAK" in line
    assert line.endswith("set packed_attention='auto'; verify_packing='off' trains anyway")
