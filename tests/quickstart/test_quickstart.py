"""The quickstart: real text, a tokenizer that keeps it, and one run of everything in miniature."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import forks
import pytest

from fastpack_trl.errors import UserError
from fastpack_trl.measure.intervals import summary
from fastpack_trl.quickstart import corpus, small_model
from fastpack_trl.quickstart import run as quickstart
from fastpack_trl.quickstart.stages import comparison_figures
from fastpack_trl.recipe import paths
from fastpack_trl.recipe.paths import configs_folder

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.collect(progress=False)


@pytest.fixture(scope="module")
def tokenizer(text):
    return small_model.train_tokenizer((document.answer for document in text.documents), progress=False)


def test_corpus_is_large_and_every_text_is_in_range_and_unique(text):
    answers = [document.answer for document in text.documents]
    assert len(answers) > 5_000
    assert all(corpus.MIN_CHARS <= len(answer) <= corpus.MAX_CHARS for answer in answers)
    assert len(set(answers)) == len(answers)
    assert len({document.question for document in text.documents}) == len(answers)
    assert {document.kind for document in text.documents} == {"module", "class", "function", "method"}


def test_corpus_answers_are_the_docstrings_python_itself_shows(text):
    import posixpath
    from inspect import getdoc

    answers = {document.name: document.answer for document in text.documents}
    assert answers["posixpath.join"] == getdoc(posixpath.join)
    assert answers[
        "json.JSONDecoder.decode" if "json.JSONDecoder.decode" in answers else "json.decoder.JSONDecoder.decode"
    ] == getdoc(json.JSONDecoder.decode)
    assert answers["argparse.ArgumentParser"] == getdoc(argparse.ArgumentParser)


def test_corpus_imports_nothing_and_is_the_same_in_another_process_with_another_hash_seed(tmp_path, text):
    here, there = tmp_path / "here", tmp_path / "there"
    code = (
        # What the code itself imports late: a bar multiprocessing, `sysconfig` its own data.
        "import sys, json, ast, inspect, tqdm.auto; from pathlib import Path;"
        "from fastpack_trl.quickstart import corpus;"
        "list(tqdm.auto.tqdm([0], disable=True)); corpus.stdlib_folder(); before = set(sys.modules);"
        "found = corpus.collect(progress=False); assert set(sys.modules) == before;"
        "corpus.write_splits(found.documents, Path(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}  # and this process has imported half of the library already
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, cwd=REPOSITORY, env=environment)
    splits = corpus.write_splits(text.documents, here)
    assert sum(splits.values()) == len(text.documents)
    for name in ("train.jsonl", "test.jsonl"):
        lines = (here / name).read_bytes()
        assert lines == (there / name).read_bytes()
        first = json.loads(lines.splitlines()[0])
        assert [message["role"] for message in first["messages"]] == ["user", "assistant"]


def test_corpus_skips_and_counts_files_that_do_not_parse(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_DOCUMENTS", 1)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text('"""A module documented in more than thirty characters."""\n')
    (package / "broken.py").write_text("def (:\n")
    (package / "nulls.py").write_bytes(b'"""text"""\0')
    (package / "surrogate.py").write_text('"""A lone surrogate, \\ud800, cannot be written as UTF-8."""\n')
    (package / "scopes.py").write_text(
        "class Outer:\n"
        "    if True:\n"
        "        def method(self):\n"
        '            """Documented inside a branch of a class body."""\n'
        "    def method(self):\n"
        '        """A second definition of the same name is left out."""\n'
        '    def short(self):\n        """Too short."""\n'
        '    def copied(self):\n        """Documented inside a branch of a class body."""\n'
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_it.py").write_text('"""A test module is not reference documentation."""\n')
    found = corpus.collect(tmp_path, progress=False)
    assert [(document.name, document.kind) for document in found.documents] == [
        ("package", "module"),
        ("package.scopes.Outer.method", "method"),
    ]
    assert found.unparsed == ("package/broken.py", "package/nulls.py")
    assert found.files == 3


def test_corpus_of_an_interpreter_without_sources_is_refused_with_the_count(tmp_path):
    with pytest.raises(UserError, match="only 0 docstrings"):
        corpus.collect(tmp_path, progress=False)


def test_tokenizer_gives_every_text_back_also_after_it_was_saved_beside_a_model(tmp_path, text, tokenizer):
    from transformers import AutoTokenizer

    model = small_model.build_model(tokenizer, seed=0, max_length=1024)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # `AutoTokenizer` chooses by the model's type, and Qwen's own class would split text in other places.
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [document.answer for document in text.documents[::50]]
    texts += ["naïve “quotes”, 漢字, \U0001f600", "\t  indented\r\n\r\n   . , !", "\x00\x7f"]
    for sample in texts:
        ids = tokenizer.encode(sample)
        assert loaded.encode(sample) == ids
        assert loaded.decode(ids) == sample
    assert len(tokenizer) == small_model.VOCABULARY == model.config.vocab_size
    assert (loaded.pad_token, loaded.eos_token) == (small_model.PAD, small_model.TURN_END)
    assert loaded.pad_token_id != loaded.eos_token_id


def test_tokenizer_and_model_are_deterministic(text, tokenizer):
    import torch

    answers = [document.answer for document in text.documents[::20]]
    first, again = (small_model.train_tokenizer(answers, progress=False).get_vocab() for _ in range(2))
    assert first == again
    one, two, other = (small_model.build_model(tokenizer, seed=seed, max_length=64).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_chat_template_marks_answers_and_their_end_of_turn_only(tokenizer):
    from trl.chat_template_utils import has_generation_markers, is_chat_template_stop_token_trained

    messages = [
        {"role": "user", "content": "What does `f` do?"},
        {"role": "assistant", "content": "Return\n\n    nothing.  "},
        {"role": "user", "content": "And `g`?"},
        {"role": "assistant", "content": "The same."},
    ]
    output = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(output["input_ids"], output["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "Return\n\n    nothing.  <|im_end|>The same.<|im_end|>"
    assert has_generation_markers(tokenizer.chat_template)
    assert is_chat_template_stop_token_trained(tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nWhat does `f` do?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", 1), "--steps 1 is below 2"),
        (("--lora_steps", 0), "--lora_steps 0 is below 1"),
        (("--compare_steps", -1), "--compare_steps -1 is below 1"),
        (("--seed", -1), "--seed -1 is below 0"),
        (("--seed", 2**32), "is above 4294967295"),
        (("--json", "no/such/folder/out.json"), "cannot be written"),
        (("--json", "."), "is a folder: name a file"),
    ],
)
def test_bad_settings_are_refused_on_one_line_before_anything_is_written(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        quickstart.run(arguments(*words))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_folder_of_others_is_refused_and_overwrite_leaves_its_files_alone(tmp_path):
    mine, taken = tmp_path / "thesis.txt", tmp_path / "data" / "mine.csv"
    mine.write_text("years of work")
    with pytest.raises(UserError, match="not empty"):
        quickstart.prepare_folder(tmp_path, overwrite=False)
    taken.parent.mkdir()
    taken.write_text("1,2")
    with pytest.raises(UserError, match="already has data"):
        quickstart.prepare_folder(tmp_path, overwrite=True)
    assert taken.read_text() == "1,2"
    shutil.rmtree(taken.parent)
    quickstart.prepare_folder(tmp_path, overwrite=True)
    quickstart.prepare_folder(tmp_path, overwrite=False)  # now it is a quickstart's
    assert mine.read_text() == "years of work"
    with pytest.raises(UserError, match="is a file"):
        quickstart.prepare_folder(mine, overwrite=True)


def test_second_run_replaces_its_own_files_only(tmp_path):
    folder = tmp_path / "out"
    quickstart.prepare_folder(folder, overwrite=False)
    (folder / "model").mkdir()
    (folder / "model" / "old.bin").write_text("old")
    (folder / "my-adapter").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    (folder / "cache").symlink_to(elsewhere)
    quickstart.prepare_folder(folder, overwrite=False)
    assert sorted(path.name for path in folder.iterdir()) == [quickstart.MARKER, "my-adapter"]
    assert (elsewhere / "kept").read_text() == "kept"


def test_a_checkout_reads_the_configs_beside_the_package_and_a_wheel_those_inside_of_it(tmp_path, monkeypatch):
    assert configs_folder() == REPOSITORY / "configs"
    package = tmp_path / "site-packages" / "fastpack_trl"
    (package / "recipe").mkdir(parents=True)
    monkeypatch.setattr(paths, "__file__", str(package / "recipe" / "paths.py"))
    wheel = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in wheel["force-include"].items():
        shutil.copytree(REPOSITORY / source, package.parent / target)
    assert configs_folder() == package / "configs"


@pytest.mark.parametrize("root", [quickstart.DEFAULT_FOLDER, Path("else where: #1")])
def test_yaml_parses_with_trls_parser_and_has_no_unknown_key(tmp_path, root):
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from fastpack_trl import FastSFTConfig

    path = tmp_path / "quickstart.yaml"
    path.write_text(quickstart.yaml_text(root), encoding="utf-8")
    parser = TrlParser((ScriptArguments, FastSFTConfig, ModelConfig, DatasetMixtureConfig))
    script, training, model, _ = parser.parse_args_and_config(["--config", str(path)])
    assert Path(model.model_name_or_path) == root / "model"
    assert Path(script.dataset_name) == root / "data"
    # Its own folder: a later quickstart replaces `adapter`, not what a user has trained.
    assert Path(training.output_dir).name not in quickstart.OUR_NAMES
    assert (training.packing, training.packing_strategy, training.packed_attention) == (True, "bfd", "auto")
    assert (training.bf16, training.use_cpu, training.save_strategy, training.report_to) == (False, True, "no", [])
    assert (model.use_peft, model.lora_target_modules) == (True, "all-linear")


def row(stock: list[float], ours: list[float]) -> dict[str, Any]:
    """A row of `compare`, where stock takes twice as long."""
    sides = {
        name: {
            "losses": losses,
            "seconds": summary([seconds for _ in losses]),
            "token_rates": {"nonpad": summary([100 / seconds for _ in losses])},
        }
        for name, losses, seconds in (("stock", stock, 2.0), ("fastpack", ours, 1.0))
    }
    return {"sides": sides, "ratios": {"stock": summary([2.0 for _ in ours])}, "order": []}


def test_the_comparison_has_rates_ratio_and_the_largest_difference_of_its_first_nine_steps():
    found = comparison_figures(row([8.0, 6.0] * 5, [8.0, 6.0 + 2.0**-21] * 4 + [8.0, 7.0]))
    names = ("stock_tokens_per_s", "fastpack_tokens_per_s", "ratio")
    assert [found[name] for name in names] == [50.0, 100.0, 2.0]
    assert all(found[f"{name}_interval"]["median"] == found[name] for name in names)
    assert found["max_loss_difference"] == 2.0**-21 <= found["loss_difference_bound"] == 2.0**-14


@pytest.mark.parametrize("wrong", [6.01, float("nan"), float("inf")])
def test_a_different_or_missing_loss_is_not_called_rounding(wrong):
    found = comparison_figures(row([8.0, 6.0], [8.0, wrong]))
    assert not found["max_loss_difference"] <= found["loss_difference_bound"]


def test_a_side_that_failed_is_named():
    failed = row([8.0], [8.0])
    failed["sides"]["stock"] = {"failed": "out of memory"}
    with pytest.raises(RuntimeError, match="stock failed: out of memory"):
        comparison_figures(failed)


IN_MINIATURE = """
import sys
from fastpack_trl.cli.main import main
from fastpack_trl.quickstart import corpus

files = corpus.source_files
corpus.source_files = lambda folder: files(folder)[::8]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_miniature_run_writes_what_it_says_and_keeps_every_promise(tmp_path):
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    words = ["quickstart", "--output_dir", out, "--json", figures]
    words += ["--steps", 8, "--lora_steps", 2, "--compare_steps", 1]
    command = [forks.python(), "-c", IN_MINIATURE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found == json.loads((out / "quickstart.json").read_text(encoding="utf-8"))
    kept = {promise["name"]: promise["kept"] for promise in found["promises"]}
    assert kept == {
        "full_loss_falls": None, "lora_loss_falls": None, "adapter_reloads": True, "losses_equal_stock": True,
    }  # fmt: skip
    assert "too short to promise: full fine-tune" in done.stdout
    assert "before training: " in done.stdout
    assert found["adapter"]["answer_before"] != found["adapter"]["answer"]
    assert done.stdout.count("fastpack-trl 0.") == 2, "the banner, once for each of the two runs that are shown"
    assert len([entry for entry in found["full"]["log"] if "loss" in entry]) == 8
    assert found["full"]["last_loss"] < found["full"]["first_loss"]
    assert len(found["lora"]["held_out_loss"]) == 2
    assert found["comparison"]["order"] == ["stock", "fastpack", "fastpack", "stock"]
    assert found["comparison"]["max_loss_difference"] <= found["comparison"]["loss_difference_bound"]
    assert found["full"]["features"]["packed_attention"]["status"] == "on"
    assert found["versions"]["trl"]
    assert found["data"]["splits"]["train"] > 500

    for name in ("data/train.jsonl", "init/model.safetensors", "model/config.json", "quickstart.yaml"):
        assert (out / name).stat().st_size > 0
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    for words_shown in ("x stock", "non-padding", "full fine-tune", "held-out", "adapter in fresh objects"):
        assert words_shown in done.stdout
    assert "Traceback" not in done.stderr
