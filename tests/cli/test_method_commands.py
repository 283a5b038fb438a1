"""``fastpack-trl sft``, ``dpo``, ``reward``, ``kto``, ``grpo`` and ``rloo``: real steps on each form of data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sft_material import Material, refused, settings, write_jsonl, write_yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fastpack_trl.bench.command import measure_side
from fastpack_trl.bench.watch import SideResult
from fastpack_trl.cli.main import main
from fastpack_trl.packing.columns import COLUMNS, made_for
from fastpack_trl.recipe.arguments import make_parser, parse
from fastpack_trl.recipe.methods import METHODS, method_of
from fastpack_trl.recipe.train import train

QUESTION = [{"role": "user", "content": "the quick brown"}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("fox jumps", "lazy dog")]
ONLINE = {
    "num_generations": 2, "max_completion_length": 4, "max_length": ..., "per_device_train_batch_size": 2,
    "reward_funcs": ["rewards_of_a_user.letters"],
}  # fmt: skip
MORE: Mapping[str, Mapping[str, object]] = {
    "grpo": ONLINE, "rloo": ONLINE, "kto": {"per_device_train_batch_size": 2}, "reward": {"lora_task_type": "SEQ_CLS"},
}  # fmt: skip
PAIR = {"prompt": "the quick", "chosen": " brown fox", "rejected": " lazy dog"}
ROWS: Mapping[str, Mapping[str, object]] = {
    "sft": {"prompt": "the quick brown", "completion": " fox"},
    "sft, messages": {"messages": QUESTION + ANSWERS[0]},
    "sft, conversations": {
        "conversations": [{"from": turn["role"], "value": turn["content"]} for turn in QUESTION + ANSWERS[0]]
    },
    "sft, tokens": {"input_ids": [5, 6, 7, 8, 9]},
    "dpo": PAIR,
    "reward": PAIR,
    "kto": {"prompt": "the quick", "completion": " brown fox", "label": True},
    "kto, pairs": PAIR,
    "grpo": {"prompt": "the quick brown"},
    "grpo, messages": {"prompt": QUESTION, "wanted": "fox"},
    "rloo": {"prompt": "the quick brown"},
}
REWARDS = """
def letters(completions, **kwargs):
    return [float(len(str(text))) for text in completions]

def matches(completions, wanted, **kwargs):
    return [float(one in str(text)) for text, one in zip(completions, wanted)]
"""


@pytest.fixture(autouse=True)
def here(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the test, whose rewards are not those of another."""
    monkeypatch.chdir(material.folder)
    monkeypatch.delitem(sys.modules, "rewards_of_a_user", raising=False)


def material_of(material: Material, command: str, row: Mapping[str, object], **more: object) -> Path:
    """The YAML of a short run on rows like this one; labels take turns."""
    rows = [row | ({"label": number % 2 == 0} if "label" in row else {}) for number in range(16)]
    data = write_jsonl(material.folder / "rows.jsonl", rows)
    (material.folder / "rewards_of_a_user.py").write_text(REWARDS, encoding="utf-8")
    values = settings(material.model, data, material.out, packing=..., **MORE.get(command, {}) | more)
    return write_yaml(material.folder / f"{command}.yaml", {key: v for key, v in values.items() if v is not ...})


def run(command: str, *argv: object) -> Any:
    return train([str(word) for word in argv], METHODS[command])


@pytest.mark.parametrize("kind", ROWS)
def test_a_yaml_trains_ours_and_saves_a_model(material: Material, kind: str) -> None:
    command, more = kind.partition(",")[0], {"use_peft": True, "lora_r": 4}
    if kind == "grpo, messages":
        more["reward_funcs"] = ["rewards_of_a_user.matches", "think_format_reward"]
    method = METHODS[command]
    path = material_of(material, command, ROWS[kind], **more)
    trainer = run(command, "--config", path, "--max_steps", "2", "--learning-rate", "5e-4")
    assert isinstance(trainer, method.classes[0])
    assert (trainer.state.global_step, trainer.args.learning_rate) == (2, 5e-4)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2]
    assert (material.out / "adapter_config.json").is_file()
    if kind == "grpo, messages":  # a function of the user gets the columns that it names
        assert {"rewards/matches/mean", "rewards/think_format_reward/mean"} <= set(trainer.state.log_history[0])


@pytest.mark.parametrize("command", METHODS)
def test_the_same_yaml_passes_trls_own_parser(material: Material, command: str) -> None:
    parser = import_module(f"trl.scripts.{command}").make_parser()
    # Every option of TRL at its default, below those of the file.
    defaults = {action.dest: action.default for action in parser._actions if action.dest != "help"}
    plain = {name: getattr(value, "value", value) for name, value in defaults.items() if value not in (None, [])}
    more = {"lora_target_modules": "all-linear", "model_init_kwargs": {"use_cache": False}, "use_peft": True}
    values = plain | settings(*material.paths) | MORE.get(command, {}) | more
    given = {key: value for key, value in values.items() if key in defaults and value is not ...}
    path = str(write_yaml(material.folder / "all.yaml", given))
    ours = parse(["--config", path], METHODS[command])
    script, training, model, mixture = parser.parse_args_and_config(["--config", path])
    assert vars(ours.script) == vars(script)
    assert vars(ours.model) == vars(model)
    assert vars(ours.mixture) == vars(mixture)
    shared = {name: value for name, value in training.to_dict().items() if name != "logging_dir"}
    assert {name: ours.training.to_dict()[name] for name in shared} == shared


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_the_help_has_our_options_and_all_of_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    ours = capsys.readouterr().out
    assert all(option in ours for option in ("--packed_attention", "--dataset_format", "--config FILE", "--help-all"))
    assert "--lora_r" not in ours
    assert len(ours.splitlines()) < 200
    assert main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert all(action.option_strings[0] in whole for action in make_parser(METHODS[command])._actions)
    assert f"every option of `trl {command}`" in " ".join(whole.split())


GRPO = {"prompt": "the quick brown"}
WRONG: list[tuple[str, Mapping[str, object], Mapping[str, Any], str]] = [
    ("sft", PAIR, {}, "or use `fastpack-trl dpo`, which they fit"),
    ("sft", {"prompt": "a"}, {}, "use `fastpack-trl grpo`"),
    ("dpo", ROWS["kto"], {}, "use `fastpack-trl kto`"),
    ("dpo", PAIR | {"chosen": 5}, {}, "has 5 in 'chosen' of its first row: it must be a string or a list of turns"),
    ("kto", ROWS["kto"] | {"label": "no"}, {}, "row 0 of the train data set"),
    ("grpo", GRPO, {"reward_funcs": ...}, "no reward: set reward_funcs to some of accuracy_reward"),
    ("grpo", GRPO, {"reward_funcs": ["acuracy_reward"]}, "no attribute acuracy_reward: name some of accuracy_reward"),
    ("grpo", GRPO, {"reward_funcs": ["rewards_of_a_user.leters"]}, "has no attribute 'leters'"),
    (
        "grpo",
        GRPO,
        {"reward_funcs": ["accuracy_reward"]},
        "accuracy_reward needs a column 'solution': there are prompt",
    ),
    ("grpo", GRPO, {"reward_funcs": ["absent.letters"]}, "No module named 'absent': name some of accuracy_reward"),
    ("reward", PAIR, {"use_peft": True, "lora_task_type": "CAUSAL_LM"}, "a reward model needs SEQ_CLS"),
    ("dpo", PAIR, {"model_name_or_path": "classifier"}, "(DPO) needs a causal language model (...ForCausalLM)"),
]


@pytest.mark.parametrize(("command", "row", "more", "says"), WRONG)
def test_data_rewards_and_models_of_another_kind_are_one_line(
    material: Material, capsys: pytest.CaptureFixture[str], command: str, row: Any, more: Mapping[str, Any], says: str
) -> None:
    if "model_name_or_path" in more:
        AutoModelForSequenceClassification.from_pretrained(material.model).save_pretrained("classifier")
    path = material_of(material, command, row, **more)
    write_jsonl(material.folder / "rows.jsonl", [row] * 4)
    assert says in refused(material, capsys, "--config", path, command=command)


def test_a_causal_model_and_a_classifier_are_both_models_of_rewards(material: Material) -> None:
    first = material_of(material, "reward", PAIR, max_steps=1)
    run("reward", "--config", first)
    model = AutoModelForSequenceClassification.from_pretrained(material.out)
    assert model.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(material.out).pad_token == "<pad>"
    again = run("reward", "--config", first, "--model_name_or_path", material.out, "--output_dir", "again")
    assert again.state.global_step == 1


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("sft", {"packing": True}), ("sft", {}), ("sft", {"num_processes": 2}), ("dpo", {"beta": 0.1}),
        ("kto", {"desirable_weight": 1.0}), ("reward", {"center_rewards_coefficient": 0.1}),
        ("grpo", {"reward_funcs": ["think_format_reward"], "num_generations": 8, "epsilon_high": 0.3}),
        ("rloo", {"reward_funcs": ["think_format_reward"], "reward_clip_range": [-1, 1]}),
    ],
)  # fmt: skip
def test_the_keys_of_a_yaml_say_what_it_is_for(command: str, keys: Mapping[str, object]) -> None:
    assert method_of(["max_length", "use_peft", *keys]).command == command
    assert method_of(keys, "kto").command == "kto"


@pytest.mark.parametrize("command", ["dpo", "grpo"])
def test_the_doctor_shows_what_would_run(material: Material, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = material_of(material, command, ROWS[command], use_peft=True)
    assert main(["doctor", "--config", str(path), "--trainer", command]) == 0
    assert "packed_attention" in capsys.readouterr().out
    assert not material.out.exists()


@pytest.mark.parametrize(("command", "figure"), [("dpo", "loss"), ("grpo", "gradient norm")])
def test_bench_trains_both_sides_of_a_command_to_the_same_losses(material: Material, command: str, figure: str) -> None:
    config, steps = material_of(material, command, ROWS[command]), {"warmup": 2, "timed": 1, "gate": 2, "seed": 0}
    row = {"config": str(config), "flags": ["--trainer", command], "steps": steps}
    stock, ours = (SideResult(**measure_side(row, name)) for name in ("stock", "fastpack"))
    assert stock.compares == ours.compares == figure
    assert all(value > 0 for value in stock.compared)
    assert ours.compared == pytest.approx(stock.compared, rel=1e-4)
    assert stock.report is None is not ours.report


def test_bench_measures_no_engine_of_generation(material: Material, capsys: pytest.CaptureFixture[str]) -> None:
    path = material_of(material, "grpo", PAIR)
    assert main(["bench", "--config", str(path), "--trainer", "grpo", "--use_vllm", "True"]) == 2
    assert "bench times only the learner, on random completions: give --use_vllm False" in capsys.readouterr().err
    assert main(["bench", "--config", str(material.yaml()), "--image_row_tokens", "64"]) == 2
    assert "image_row_tokens=64: TRL has no such rows to compare with" in capsys.readouterr().err


@pytest.mark.parametrize("command", COLUMNS)
def test_columns_of_a_method_are_made_for_a_command_that_takes_them(command: str) -> None:
    for columns in COLUMNS[command]:
        found = made_for(columns)
        assert found == command or columns in COLUMNS[found]
    assert made_for(["sentence"]) == ""
