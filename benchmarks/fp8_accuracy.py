"""Does LoRA learn as well over a base in FP8? Held-out loss beside a bf16 and an NF4 base, with paired seeds.

A model of about 90 M parameters is trained on Python source for some minutes. Then each side trains LoRA from it on
questions about the standard library with its docstrings as answers; a seed is the same adapters and order of rows on
every side. A second model computes the same with outlier channels: norms and values times 30, the weights that read
them divided by it. FP8 passes where the mean difference of the last held-out loss to bf16's is at most the spread of
bf16's seeds and that of NF4's. Gradients of the adapters are compared with those of the same model in fp32.
A run that was stopped starts anew.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainerCallback

from benchmarks.command import CaseCommand
from benchmarks.lora_models import ALPHA, PROJECTIONS, RANK, definitions, quantise
from benchmarks.model_shapes import ModelShape, build_model, decoder_shape
from benchmarks.readme_cells import grid
from fastpack_trl.bench.canvas import Figure, headed, legend, new_figure
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.bench.views import device_of
from fastpack_trl.errors import UserError
from fastpack_trl.lora.frozen_base import put_in_fp8
from fastpack_trl.lora.linear import FastLora, apply_lora
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.record import make_record
from fastpack_trl.quickstart.corpus import collect

CASE = "fp8_accuracy"
SIDES: dict[str, dict[str, Any]] = {"bf16": {}, "nf4": {}, "fp8": {"frozen_base": "fp8"}}
MODELS = {"as trained": 0, "with outliers": 100}
"""By name: one channel of so many is an outlier; 0: none."""
FACTOR = 30.0
SHAPE = decoder_shape("qwen3", (12, 768, 2048), (12, 4, 64), 8000, tied=True, theta=1e4)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a measurement; tokens of rows, rows of a step, steps."""

    shape: ModelShape = SHAPE
    row: int = 1024
    batch: int = 8
    pretrain_seconds: float = 120.0
    pretrain_tokens: int = 4_000_000
    steps: int = 120
    evaluations: int = 5
    documents: int | None = None
    """Of the corpus; all by default. One of 20 is held out."""
    gradient_tokens: int = 512


class _Until(TrainerCallback):
    def __init__(self, seconds: float) -> None:
        self.end, self.seconds = float("inf"), seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.end = time.perf_counter() + self.seconds
        control.should_training_stop |= time.perf_counter() >= self.end


def _trainer(model: Any, plan: Plan, device: str, seed: int, data: dict[str, Any], **fields: Any) -> Any:
    from fastpack_trl import FastSFTConfig, FastSFTTrainer

    args = FastSFTConfig(
        packing=True, max_length=plan.row, per_device_train_batch_size=plan.batch,
        per_device_eval_batch_size=plan.batch, bf16=device == "cuda", use_cpu=device != "cuda", report_to="none",
        save_strategy="no", disable_tqdm=True, seed=seed, data_seed=seed, save_report="off",
        gradient_checkpointing=False, **fields,
    )  # fmt: skip
    return FastSFTTrainer(model, args=args, **data)


def pretrained(plan: Plan, device: str, seed: int, folder: str) -> tuple[Any, dict[str, Any]]:
    """Train a model from random weights on Python source; return it in bf16 on the CPU, and the course of its loss."""
    tokenizer, documents = source(plan)
    model = build_model(plan.shape, positions=plan.row, seed=seed, device=device)
    until = _Until(plan.pretrain_seconds)
    trainer = _trainer(
        model, plan, device, seed, {"train_dataset": documents, "processing_class": tokenizer, "callbacks": [until]},
        output_dir=folder, num_train_epochs=50, learning_rate=6e-4, warmup_steps=20, logging_steps=20, weight_decay=0.1,
    )  # fmt: skip
    trainer.train()
    losses = [[entry["step"], entry["loss"]] for entry in trainer.state.log_history if "loss" in entry]
    fresh = build_model(plan.shape, positions=plan.row, seed=seed, device="cpu")  # TRL's forward stays on the other
    fresh.load_state_dict(model.state_dict())
    return fresh.bfloat16(), {"losses": losses, "parameters": sum(own.numel() for own in fresh.parameters())}


@torch.no_grad()
def with_outliers(model: Any, every: int) -> Any:
    """Return a copy that computes the same, where one channel of so many is `FACTOR` times as large; 0: as it is.

    Where a projection reads a norm, its channels of it; where it reads values or the product of gate and up, those.
    """
    model = copy.deepcopy(model)
    if not every:
        return model
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    channels = slice(every // 2, None, every)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layer.input_layernorm.weight[channels] *= FACTOR
        layer.post_attention_layernorm.weight[channels] *= FACTOR
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            projection.weight[:, channels] /= FACTOR
        mlp.up_proj.weight[channels] *= FACTOR
        mlp.down_proj.weight[:, channels] /= FACTOR
        values = torch.arange(attention.v_proj.weight.shape[0])[channels]
        attention.v_proj.weight[values] *= FACTOR
        head, place = values // config.head_dim, values % config.head_dim
        for query in range(group):  # each head of values is read by as many heads of queries
            attention.o_proj.weight[:, (head * group + query) * config.head_dim + place] /= FACTOR
    return model


def adapted(model: Any, side: str, device: str, seed: int) -> Any:
    """Return a copy of the model with LoRA for a side, on the device; adapters are those of the seed."""
    base = copy.deepcopy(model).to(device)
    if side == "nf4":
        quantise(base, device)
    torch.manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    peft = get_peft_model(base, config)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # of one dtype on every side
    return peft


def learnt(model: Any, side: str, plan: Plan, device: str, seed: int, folder: str) -> dict[str, Any]:
    """Train LoRA for a side; return held-out and training losses by step, and what the report says."""
    tokenizer, _ = source(plan)
    train, held_out = questions(plan)
    data = {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}
    trainer = _trainer(
        adapted(model, side, device, seed), plan, device, seed, data, output_dir=folder, max_steps=plan.steps,
        learning_rate=4e-4, warmup_steps=5, logging_steps=max(1, plan.steps // 20), eval_strategy="steps",
        eval_steps=plan.steps // plan.evaluations, **SIDES[side],
    )  # fmt: skip
    start = trainer.evaluate()["eval_loss"]  # over the base as loaded: B is zero
    trainer.train()
    history = trainer.state.log_history
    report = trainer.fastpack_report.to_dict()["features"]
    return {
        "held_out": [[0, start], *([entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry)],
        "losses": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "frozen_base": report.get("frozen_base", {}).get("reason"),
        "paths": {name: line["path"] for name, line in report.items() if line["status"] == "on"},
    }


def questions(plan: Plan) -> tuple[Dataset, Dataset]:
    """Return token ids to train on and held-out ones: questions about the standard library, docstrings as answers."""
    rows = [ids[: plan.row] for ids in _ids(source(plan)[0])[: plan.documents]]
    train = [row for index, row in enumerate(rows) if index % 20]
    return Dataset.from_dict({"input_ids": train}), Dataset.from_dict({"input_ids": rows[::20]})


@cache
def _ids(tokenizer: Any) -> list[list[int]]:
    messages = [document.messages() for document in collect(progress=False).documents]
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in messages]
    ids: list[list[int]] = tokenizer(texts)["input_ids"]
    return ids


def source(plan: Plan) -> tuple[Any, Dataset]:
    """Return a tokenizer and the token ids of Python source that models are trained on first."""
    return definitions(plan.pretrain_tokens, plan.shape.fields["vocab_size"], plan.row)


def gradient_errors(model: Any, plan: Plan, device: str, seed: int) -> dict[str, list[float]]:
    """Return by side the relative error of the adapters' gradients of each layer, against the same model in fp32."""
    held_out = [token for row in questions(plan)[1]["input_ids"][:20] for token in row]
    ids = torch.tensor([held_out[: plan.gradient_tokens]], device=device)
    true = _gradients(model.float(), "bf16", ids, device, seed, torch.float32)
    model.bfloat16()
    errors = {}
    for side in SIDES:
        found = _gradients(model, side, ids, device, seed, torch.bfloat16)
        errors[side] = [float((one - other).norm() / other.norm()) for one, other in zip(found, true, strict=True)]
    return errors


def _gradients(model: Any, side: str, ids: Tensor, device: str, seed: int, dtype: torch.dtype) -> list[Tensor]:
    peft = adapted(model, side, device, seed).train()
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)  # at zero, A would have no gradient
    apply_lora(peft, compute_dtype=dtype)
    if side == "fp8":
        for layer in [each for each in peft.modules() if isinstance(each, FastLora)]:
            put_in_fp8(layer, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        peft(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [
        torch.cat([each.grad.float().view(-1) for each in layer.parameters() if each.grad is not None])
        for layer in peft.get_base_model().model.layers
    ]


def judged(curves: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return whether FP8 passes, from the last held-out loss of each side and seed."""
    last = {side: {seed: found["held_out"][-1][1] for seed, found in runs.items()} for side, runs in curves.items()}
    apart = {side: [last[side][seed] - last["bf16"][seed] for seed in last["bf16"]] for side in ("nf4", "fp8")}
    spread = max(last["bf16"].values()) - min(last["bf16"].values())
    fp8, nf4 = fmean(apart["fp8"]), fmean(apart["nf4"])
    return {
        "last": last, "apart": apart, "spread": spread, "mean_apart": {"fp8": fp8, "nf4": nf4},
        "passes": fp8 <= spread and fp8 <= max(nf4, 0.0),
    }  # fmt: skip


def measure(
    plan: Plan, *, seeds: Sequence[int], device: str, seed: int = 0, seconds: float = float("inf"),
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:  # fmt: skip
    """Pre-train, then train every side of both models with every seed.

    Args:
        seconds: no further seed is begun after that many.
        save: called with what there is after each seed.

    Returns:
        A record; a row for each model. Incomplete where seconds ran out.
    """
    end = time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as folder, quiet():
        trained, course = pretrained(plan, device, seed, folder)
        free_memory(device)
        models = {name: with_outliers(trained, every) for name, every in MODELS.items()}
        errors = {name: gradient_errors(model, plan, device, seed) for name, model in models.items()}
        curves: dict[str, dict[str, dict[int, Any]]] = {name: {side: {} for side in SIDES} for name in models}
        settings = {
            "pretraining": course, "pretrain_seconds": plan.pretrain_seconds,
            "steps": plan.steps, "row": plan.row, "batch": plan.batch, "seeds": list(seeds),
            "shape": plan.shape.fields, "factor": FACTOR, "models": MODELS,
        }  # fmt: skip

        def record(complete: bool) -> dict[str, Any]:
            rows = [
                {"model": name, "curves": of, "errors": errors[name], "judged": judged(of) if of["fp8"] else None}
                for name, of in curves.items()
            ]
            made = make_record(
                case=CASE, settings=settings, rows=rows, complete=complete, device=device,
                threads=torch.get_num_threads(), seed=seed,
            )  # fmt: skip
            found: dict[str, Any] = json.loads(json.dumps(made))  # with the keys that a file has
            return found

        for each in seeds:  # all sides of a seed, or none
            if time.perf_counter() >= end:
                return record(False)
            for name, model in models.items():
                for side in SIDES:
                    found = curves[name][side][each] = learnt(model, side, plan, device, each, folder)
                    print(f"{name}, seed {each}, {side}: held-out loss {found['held_out'][-1][1]:.4f}", flush=True)
                    free_memory(device)
            save(record(each == seeds[-1]))
        return record(True)


COLOURS = {"bf16": "#999999", "nf4": "#56B4E9", "fp8": "#D55E00"}
NAMES = {"bf16": "bf16", "nf4": "NF4", "fp8": "FP8"}
_MARKS = ("-", "--", ":")
"""By seed."""


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: the last held-out loss by side and seed, how far gradients are off, and whether FP8 passes."""
    settings = record["settings"]
    size = settings["pretraining"]["parameters"] / 1e6
    head = (
        f"**LoRA over a base in bf16, NF4 and FP8, {device_of(record)}.** {size:.0f} M parameters, {settings['steps']} "
        f"steps of {settings['batch']} rows of {settings['row']:,} tokens; paired seeds."
    )
    lines, said = [], []
    for row in record["rows"]:
        judged = row["judged"]
        for side, errors in row["errors"].items():
            last = judged["last"][side].values() if judged else ()
            mean = f"{judged['mean_apart'][side]:+.4f}" if judged and side in judged["mean_apart"] else "-"
            ordered = sorted(errors)
            off = f"{ordered[len(ordered) // 2]:.1%}, {ordered[-1]:.1%}"
            values = ", ".join(f"{loss:.4f}" for loss in last) or "-"
            lines.append([row["model"], side, values, mean, off])
        if judged:
            answer = "yes" if judged["passes"] else "no"
            spread = f"{judged['spread']:.4f}"
            said.append(f"{row['model']}: FP8 within the spread of bf16's seeds ({spread}) and of NF4: {answer}  ")
    columns = "model | base | held-out loss by seed | >from bf16's, mean | gradients off: median, worst layer"
    return "\n".join([head, "", grid(columns, lines), "", *said])


def plot(record: Mapping[str, Any], source: str = "") -> Figure:
    """Draw held-out losses by step, the difference to bf16's of the same seed, and gradient errors by layer.

    Raises:
        UserError: matplotlib is missing.
    """
    rows = record["rows"]
    made, grid = new_figure(record, 2.2 * len(rows) + 1.2, source, nrows=len(rows), ncols=3, squeeze=False)
    shown: dict[str, Any] = {}
    for row, (losses, apart, errors) in zip(rows, grid, strict=True):
        for side, seeds in row["curves"].items():
            for mark, (seed, found) in zip(_MARKS, seeds.items(), strict=False):
                steps, values = zip(*found["held_out"], strict=True)
                (line,) = losses.plot(steps, values, mark, color=COLOURS[side])
                shown.setdefault(f"base in {NAMES[side]}", line)
                base = [loss for _, loss in row["curves"]["bf16"][seed]["held_out"]]
                differences = [one - other for one, other in zip(values, base, strict=True)]
                apart.plot(steps, differences, mark, color=COLOURS[side])
        for side, found in row["errors"].items():
            errors.plot([100 * error for error in found], color=COLOURS[side])
        losses.set_ylabel(f"model {row['model']}")
        errors.set_ylim(bottom=0)
        errors.locator_params(axis="x", integer=True)
    titles = ("held-out loss", "held-out loss minus bf16's", "gradient error against fp32, %")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    for axes, label in zip(grid[-1], ("step", "step", "layer"), strict=True):
        axes.set_xlabel(label)
    legend(made, shown)
    return headed(
        made,
        f"LoRA over a frozen base in bf16, NF4 and FP8, {device_of(record)}",
        "Solid, dashed, dotted: three seeds, the same ones over each base",
    )


def _record(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise UserError("it trains in FP8: it needs a CUDA device from Ada or Hopper on")
    plan = Plan(steps=args.steps, pretrain_seconds=args.pretrain_seconds)
    save = (lambda found: None) if file is None else file.save
    return measure(plan, seeds=args.seeds, device="cuda", seed=args.seed, seconds=args.seconds, save=save)


def add_options(parser: ArgumentParser) -> None:
    """Add the seeds, and how long is trained."""
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of adapters and order (default: %(default)s)")
    add("--steps", type=int, default=Plan().steps, help="of LoRA (default: %(default)s)")
    add("--pretrain-seconds", type=float, default=Plan().pretrain_seconds, help="default: %(default)s")


COMMAND = CaseCommand(case=CASE, help=__doc__, record=_record, table=table, figure=plot, more=add_options)

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
