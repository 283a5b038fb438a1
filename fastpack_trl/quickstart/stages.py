"""Stages of the quickstart: inputs, two trainings, an answer, a comparison; imported once the process is offline."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from fastpack_trl.bench.compare import compare
from fastpack_trl.measure.record import make_record
from fastpack_trl.quickstart import corpus, small_model
from fastpack_trl.recipe.arguments import as_flags
from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments
from fastpack_trl.recipe.train import train

if TYPE_CHECKING:
    from fastpack_trl.trainer import FastSFTTrainer

FULL: dict[str, object] = {
    "use_peft": False, "learning_rate": 3e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3,
}  # fmt: skip
"""Flags over ``quickstart.yaml`` with which all weights are trained."""
MAX_LENGTH = 1_024  # tokens of a packed row
MAX_NEW_TOKENS = 48
LAST = 10  # logged losses in a phase's last loss: a row packs documents of one size, so a step's loss is noisy
WARMUP_STEPS = 1  # of the comparison: the first step allocates memory and chooses algorithms
ROUNDS = 2  # of its timed steps
FLOAT32_EPS = 2.0**-23
# Both sides compute the same sums in float32, in another order: the losses of a step differ by a few units in the last
# place, and the optimizer carries such differences on. 64 units (6e-5 at a loss of 8) leave room for that; documents
# that see their neighbours move the loss of a single step by a hundred times as much.
ROUNDING_UNITS = 64
COMPARED_STEPS = 9  # later ones have carried the differences on for too long


def run_all(args: Any, folder: Path) -> dict[str, Any]:
    """Run every stage in `folder`, which has a ``quickstart.yaml``; return their figures, as the JSON has them.

    Args:
        args: of the command.
    """
    seconds: dict[str, float] = {}
    names = ("steps", "lora_steps", "compare_steps", "seed", "overwrite")
    settings = {"output_dir": str(folder), **{name: getattr(args, name) for name in names}, "full": FULL}
    out = make_record(
        case="quickstart", settings=settings, rows=[], complete=True, threads=torch.get_num_threads(), seed=args.seed
    )
    out["seconds"] = seconds

    @contextmanager
    def stage(title: str) -> Iterator[None]:
        print(f"\n== {title}", flush=True)
        start = perf_counter()
        yield
        seconds[title] = perf_counter() - start

    with stage("1/5 Data, tokenizer and model"):
        out["data"], out["model"] = make_inputs(folder, args.seed)
    with stage("2/5 Full fine-tune from random weights"):
        out["full"] = _phase(_train(folder, "init", "model", args.steps, args.seed, **FULL))
    with stage("3/5 LoRA: fastpack-trl sft --config quickstart.yaml"):
        trainer = _train(folder, "model", "adapter", args.lora_steps, args.seed)
        out["lora"] = _phase(trainer)
    with stage("4/5 One question before and after, with the adapter in fresh objects"):
        out["adapter"] = _answer_with_adapter(folder, trainer.model, args.seed)
    with stage("5/5 The same steps with stock TRL and with fastpack"):
        out["comparison"] = _comparison(folder, args)
    return out


def make_inputs(folder: Path, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write ``data/`` with the text, ``init/`` with tokenizer and random model; return their figures."""
    text = corpus.collect()
    splits = corpus.write_splits(text.documents, folder / "data")
    tokenizer = small_model.train_tokenizer(
        part for document in text.documents for part in (document.question, document.answer)
    )
    model = small_model.build_model(tokenizer, seed=seed, max_length=MAX_LENGTH)
    tokenizer.save_pretrained(folder / "init")
    model.save_pretrained(folder / "init")
    data = {
        "documents": len(text.documents),
        "characters": sum(len(document.answer) for document in text.documents),
        "files_parsed": text.files,
        "files_unparsed": list(text.unparsed),
        "splits": splits,
    }
    parameters = model.num_parameters()
    print(f"{data['documents']:,} documents, {data['characters']:,} characters; {parameters:,} parameters")
    return data, {"architecture": type(model).__name__, "parameters": parameters, "vocabulary": len(tokenizer)}


def _train(folder: Path, model: str, output: str, steps: int, seed: int, **more: object) -> FastSFTTrainer:
    """Train as ``fastpack-trl sft --config quickstart.yaml`` with other flags, and save `output`."""
    flags = {"config": folder / "quickstart.yaml", "output_dir": folder / output, "max_steps": steps, **more}
    if steps < 10:
        flags["logging_steps"] = 1  # the YAML's five would leave fewer than two losses to compare
    return train(as_flags(flags | _inputs(folder, model, seed)))


def _inputs(folder: Path, model: str, seed: int) -> dict[str, object]:
    return {"model_name_or_path": folder / model, "dataset_name": folder / "data", "seed": seed}


def _phase(trainer: FastSFTTrainer) -> dict[str, Any]:
    """Return what a trainer has logged and reported; ``held_out_loss`` is from before the first step and the end."""
    log = [dict(entry) for entry in trainer.state.log_history]
    losses = [float(entry["loss"]) for entry in log if "loss" in entry]
    return {
        "first_loss": losses[0],
        "last_loss": fmean(losses[-max(1, min(LAST, len(losses) // 2)) :]),
        "held_out_loss": [float(entry["eval_loss"]) for entry in log if "eval_loss" in entry],
        "log": log,
        **trainer.fastpack_report.to_dict(),
    }


def _answer_with_adapter(folder: Path, trained: Any, seed: int) -> dict[str, Any]:
    """Load ``adapter/`` into fresh objects, compare its logits with the trained model's, and answer one question.

    The same question is given to ``init/``, the model before any training.
    """
    with (folder / "data" / "test.jsonl").open(encoding="utf-8") as file:
        messages = json.loads(file.readline())["messages"][:1]
    question = messages[0]["content"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    fresh = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter").eval()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        difference = (fresh(**prompt).logits - trained.eval()(**prompt).logits).abs().max().item()
    before, _ = _answer(AutoModelForCausalLM.from_pretrained(folder / "init").eval(), tokenizer, prompt, seed)
    answer, new_tokens = _answer(fresh, tokenizer, prompt, seed)
    print(f"Q: {question}\nbefore training: {before}\nafter:           {answer}")
    print("(it began with random weights: it has learnt something of the style, and none of the facts)")
    return {
        "question": question,
        "answer_before": before,
        "answer": answer,
        "new_tokens": new_tokens,
        "max_logit_difference": difference,
    }


def _answer(model: Any, tokenizer: Any, prompt: Any, seed: int) -> tuple[str, int]:
    """Return what the model says to the prompt, on one line, and the number of new tokens."""
    set_seed(seed)
    with torch.no_grad():
        # Sampled: the likeliest next word of a model this small is "the", over and over.
        tokens = model.generate(
            **prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=0.7, top_k=40, repetition_penalty=1.2
        )
    new_tokens = tokens[0, prompt["input_ids"].shape[1] :]
    return " ".join(tokenizer.decode(new_tokens, skip_special_tokens=True).split()), len(new_tokens)


def _comparison(folder: Path, args: Any) -> dict[str, Any]:
    """Train all weights of ``model/`` with stock and with fastpack, a step of each in turn."""

    def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
        flags = as_flags(FULL | _inputs(folder, "model", args.seed) | changes)
        arguments = short_run_arguments(str(folder / "quickstart.yaml"), str(folder / "comparison"), *flags)
        return make_trainer(arguments, trainer_class=trainer_class)

    with redirect_stdout(io.StringIO()):  # the banner: the runs before have shown it
        record = compare(build, pairs=ROUNDS * args.compare_steps, warmup=WARMUP_STEPS, gate_steps=0, seed=args.seed)
    if not record["complete"]:
        raise KeyboardInterrupt
    return comparison_figures(record["rows"][0])


def comparison_figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a row of `compare`: speeds, their ratio, and how far apart the losses are.

    Raises:
        RuntimeError: a side failed; names it and the reason.
    """
    for name, side in row["sides"].items():
        if "failed" in side:
            raise RuntimeError(f"the comparison cannot be made, {name} failed: {side['failed']}")
    stock, ours = (row["sides"][name] for name in ("stock", "fastpack"))
    intervals = {
        "stock_tokens_per_s": stock["token_rates"]["nonpad"],
        "fastpack_tokens_per_s": ours["token_rates"]["nonpad"],
        "ratio": row["ratios"]["stock"],
    }
    out: dict[str, Any] = {
        "tokens": "non-padding tokens of a step / seconds from the end of the step before to its end; median, with the "
        "interval that covers it",
        "warmup_steps": WARMUP_STEPS,
    }
    for name, interval in intervals.items():
        out |= {name: interval["median"], f"{name}_interval": interval}
    pairs = list(zip(stock["losses"], ours["losses"], strict=True))
    finite = all(math.isfinite(loss) for pair in pairs for loss in pair)
    return out | {
        # Infinite where any loss is NaN or infinite, so that it is within no bound.
        "max_loss_difference": max(abs(a - b) for a, b in pairs[:COMPARED_STEPS]) if finite else math.inf,
        "loss_difference_bound": ROUNDING_UNITS * FLOAT32_EPS * max(1.0, *stock["losses"]) if finite else 0.0,
        "order": row["order"],
        "runs": [
            {"side": name, "losses": side["losses"], "seconds": side["seconds"]["values"]}
            for name, side in row["sides"].items()
        ],
    }
