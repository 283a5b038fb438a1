"""Parts of the quickstart that make inputs, train and generate; imported once the process is offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback

from fastpack_trl.quickstart import corpus, small_model
from fastpack_trl.quickstart.report import Phase

if TYPE_CHECKING:
    from fastpack_trl.quickstart.settings import Settings

MAX_NEW_TOKENS = 48


class LossBar(ProgressCallback):
    """The trainer's progress bar with the loss beside it, in place of a line per log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the loss of the last step."""
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.3f}")


def make_inputs(folder: Path, settings: Settings, *, test_every: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write ``data/`` with the text, ``init/`` with tokenizer and random model; return their figures."""
    text = corpus.collect()
    splits = corpus.write_splits(text, folder / "data", test_every=test_every)
    tokenizer = small_model.train_tokenizer(
        part for document in text.documents for part in (document.question, document.answer)
    )
    model = small_model.build_model(tokenizer, seed=settings.seed, max_length=settings.training["max_length"])
    tokenizer.save_pretrained(folder / "init")
    model.save_pretrained(folder / "init")
    data = {
        "documents": len(text.documents),
        "characters": text.characters,
        "files_parsed": text.files,
        "files_unparsed": list(text.unparsed),
        "splits": splits,
    }
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(text.documents):,} documents, {text.characters:,} characters; {parameters:,} parameters")
    return data, {"architecture": type(model).__name__, "parameters": parameters, "vocabulary": len(tokenizer)}


def full_fine_tune(folder: Path, settings: Settings) -> tuple[Phase, Any]:
    """Train all weights of ``init/`` on the answers and save ``model/``; return the phase and the packed rows."""
    from datasets import load_dataset

    from fastpack_trl.config import FastSFTConfig
    from fastpack_trl.trainer import FastSFTTrainer

    data = load_dataset(str(folder / "data"))
    config = FastSFTConfig(
        **settings.training,
        assistant_only_loss=True,  # as in the LoRA run, so that one loss curve continues the other
        output_dir=str(folder / "model"),
        max_steps=settings.steps,
        logging_steps=1,
        eval_on_start=True,
        eval_strategy="epoch",  # `max_steps` ends the only epoch
        per_device_eval_batch_size=2,
    )
    trainer = FastSFTTrainer(
        model=str(folder / "init"), args=config, train_dataset=data["train"], eval_dataset=data["test"]
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(LossBar)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return Phase.of(trainer), trainer.train_dataset


def lora(folder: Path, yaml_file: Path, settings: Settings) -> tuple[Phase, Any]:
    """Train as ``fastpack-trl sft --config quickstart.yaml`` and save ``adapter/``; return the phase and the model."""
    from fastpack_trl.recipe.train import train

    arguments = ["--config", str(yaml_file)]
    arguments += ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data")]
    arguments += ["--output_dir", str(folder / "adapter")]
    arguments += ["--max_steps", str(settings.lora_steps), "--seed", str(settings.seed)]
    if settings.lora_steps < 10:
        arguments += ["--logging_steps", "1"]  # the YAML's five would leave fewer than two losses to compare
    trainer = train(arguments)
    return Phase.of(trainer), trainer.model


def answer_with_adapter(folder: Path, trained: Any, *, seed: int) -> dict[str, Any]:
    """Load ``adapter/`` into fresh objects, compare its logits with the trained model's, and answer one question.

    The same question is given to ``init/``, the model before any training.
    """
    import json

    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with (folder / "data" / "test.jsonl").open(encoding="utf-8") as file:
        question = json.loads(file.readline())["messages"][:1]
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    fresh = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").eval()
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        difference = (fresh(**prompt).logits - trained.eval()(**prompt).logits).abs().max().item()
    before, _ = _answer(AutoModelForCausalLM.from_pretrained(folder / "init").eval(), tokenizer, prompt, seed)
    answer, new_tokens = _answer(fresh, tokenizer, prompt, seed)
    print(f"Q: {question[0]['content']}\nbefore training: {before}\nafter:           {answer}")
    print("(it began with random weights: it has learnt something of the style, and none of the facts)")
    return {
        "question": question[0]["content"],
        "answer_before": before,
        "answer": answer,
        "new_tokens": new_tokens,
        "max_logit_difference": difference,
    }


def _answer(model: Any, tokenizer: Any, prompt: Any, seed: int) -> tuple[str, int]:
    """Return what the model says to the prompt, on one line, and the number of new tokens."""
    import torch
    from transformers import set_seed

    set_seed(seed)
    with torch.no_grad():
        # Sampled: the likeliest next word of a model this small is "the", over and over.
        tokens = model.generate(
            **prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=0.7, top_k=40, repetition_penalty=1.2
        )
    new_tokens = tokens[0, prompt["input_ids"].shape[1] :]
    return " ".join(tokenizer.decode(new_tokens, skip_special_tokens=True).split()), len(new_tokens)
