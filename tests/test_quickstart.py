"""The quickstart's inputs: real text, a tokenizer that keeps it, a small model, and the folder that holds them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import has_generation_markers, is_chat_template_stop_token_trained

from fastpack_trl import quickstart
from fastpack_trl.errors import UserError
from fastpack_trl.quickstart import build_model, collect, make_inputs, train_tokenizer

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def text() -> list[tuple[str, str]]:
    return collect()


@pytest.fixture(scope="module")
def tokenizer(text: list[tuple[str, str]]) -> Any:
    return train_tokenizer((answer for _, answer in text))


def test_text_is_large_has_docstrings_once_and_is_always_the_same(tmp_path: Path, text: list[tuple[str, str]]) -> None:
    questions, answers = zip(*text, strict=True)
    assert len(answers) > 5_000
    assert all(len(answer) in quickstart.LENGTHS for answer in answers)
    assert len(set(answers)) == len(set(questions)) == len(answers)
    assert getdoc(os.path.join) in answers
    found = {answer for question, answer in text if "`argparse.ArgumentParser`" in question}
    assert found == {getdoc(argparse.ArgumentParser)}
    code = (
        "import sys, json, ast, inspect, sysconfig, tqdm.auto; from fastpack_trl import quickstart;"
        "list(tqdm.auto.tqdm([0], disable=None)); sysconfig.get_paths(); before = set(sys.modules);"  # imported late
        "found = quickstart.collect(); assert set(sys.modules) == before, 'no module is imported for its text';"
        "open(sys.argv[1], 'w', encoding='utf-8').write(json.dumps(found))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}  # and this process has imported half of the library already
    file = tmp_path / "text.json"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, cwd=REPOSITORY, env=environment)
    assert json.loads(file.read_text(encoding="utf-8")) == [list(pair) for pair in text]


def test_broken_files_tests_and_repeated_texts_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="only 0 docstrings"):
        collect(tmp_path)
    monkeypatch.setattr(quickstart, "LEAST", 1)
    module, method = "A module documented in more than thirty characters.", "A second definition of the same name."
    files = {
        "test/test_it.py": '"""A test module is not reference documentation."""',
        "package/__init__.py": f'"""{module}"""',
        "package/broken.py": "def (:",
        "package/nulls.py": '"""text"""\0',
        "package/scopes.py": (
            "class Outer:\n    if True:\n        def method(self):\n"
            '            """Documented inside a branch, with a lone surrogate: \\ud800."""\n'
            f'    def method(self):\n        """{method}"""\n    def short(self):\n        """Too short."""\n'
            f'    def copied(self):\n        """{module}"""\n'
        ),
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{source}\n", encoding="utf-8")
    kept = [module, "Documented inside a branch, with a lone surrogate: ."]
    assert [answer for _, answer in collect(tmp_path)] == kept


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_the_tokenizer_gives_every_text_back_also_when_it_is_loaded_beside_a_model(
    tmp_path: Path, text: list[tuple[str, str]], tokenizer: Any, family: str
) -> None:
    model = build_model(tokenizer, family)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # `AutoTokenizer` chooses by the model's type, and Qwen's own class would split text in other places.
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [answer for _, answer in text[::50]]
    texts += ["naïve “quotes”, 漢字, \U0001f600", "\t  indented\r\n\r\n   . , !", "\x00\x7f"]
    for sample in texts:
        ids = tokenizer.encode(sample)
        assert loaded.encode(sample) == ids
        assert loaded.decode(ids) == sample
    assert len(tokenizer) == quickstart.VOCABULARY == model.config.vocab_size
    assert (loaded.pad_token, loaded.eos_token) == (quickstart.PAD, quickstart.TURN_END)
    again = build_model(train_tokenizer((answer for _, answer in text)), family).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == family


def test_the_chat_template_marks_answers_and_their_end_of_turn_only(tokenizer: Any) -> None:
    turns = (("user", "What does `f` do?"), ("assistant", "Return\n\n    nothing.  "), ("user", "And `g`?"))
    messages = [{"role": role, "content": content} for role, content in (*turns, ("assistant", "The same."))]
    output = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(output["input_ids"], output["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "Return\n\n    nothing.  <|im_end|>The same.<|im_end|>"
    assert has_generation_markers(tokenizer.chat_template)
    assert is_chat_template_stop_token_trained(tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nWhat does `f` do?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_inputs_are_made_whole_once_and_beside_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [(f"What does `f{number}` do?", f"It returns {number}.") for number in range(80)]
    monkeypatch.setattr(quickstart, "collect", lambda: short)
    folder = tmp_path / "inputs"
    assert "made" in make_inputs(folder)
    lines = {split: (folder / "data" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test")}
    assert (len(lines["train"]), len(lines["test"])) == (78, 2)
    assert json.loads(lines["test"][0])["messages"][1] == {"role": "assistant", "content": "It returns 39."}
    monkeypatch.setattr(quickstart, "collect", pytest.fail)
    assert "those in" in make_inputs(folder)
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(UserError, match="was not written by `fastpack-trl init quickstart`: move it away"):
        make_inputs(mine)
    assert {path.name for path in tmp_path.iterdir()} == {"inputs", "mine"}
