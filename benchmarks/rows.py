"""What can be trained: rows by name, with their models and data. All are of public shape, with random weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import datasets
import torch
from torch import nn

from benchmarks.images import IMAGE_MODELS, image_material
from benchmarks.models import (
    ALPHA,
    ATTENTION,
    PROJECTIONS,
    RANK,
    STACKS,
    build_model,
    limit_memory,
    quantize,
    random_ids,
    shape_of,
    source_text,
    word_tokenizer,
)
from fastpack_trl.moe.quantized import quantize_experts

LONGEST_DOCUMENT = 2048
PROMPTS, COMPLETIONS = (50, 400), (30, 200)
"""Least and most tokens of preference data, drawn evenly."""
RUN = 500  # steps of the run that a row stands for
GROUP, MICRO_BATCHES = 8, 4
"""Completions of a prompt, and micro-batches of a step, of GRPO and RLOO."""
METHODS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}
USUAL = "trl", "trl compiled", "fastpack"
PAIR = "trl", "fastpack"


@dataclass(frozen=True, slots=True)
class Row:
    """One training: ``Row("sft", "qwen3-8b", 4096, "lora")``.

    Attributes:
        case: the table of RESULTS.md that it is in.
        tokens: of a packed row, or of the longest example.
        kind: ``lora``, ``nf4`` (LoRA over 4 bits), ``full``, ``experts`` (LoRA on attention and expert stacks),
            ``frozen`` (LoRA on attention alone) or ``nf4-experts`` (the same over expert stacks in 4 bits).
        batch: examples of a micro-batch and micro-batches of a step if rows are not packed.
        documents: tokens of random documents that repeat: ``(321, 300, 80)``; none: code.
        prefix: shared and mean own tokens of documents; `completions`: the loss counts their own tokens alone.
        prompts: least and most tokens of a prompt.
        run: number of steps of a whole run; 0: the first ones of a run of `RUN`.
        engine: ``ddp`` or ``fsdp2``: one process per GPU.
        cap: GiB of the device that may be used once the model is made; 0: all.
    """

    case: str
    model: str
    tokens: int
    kind: str = "lora"
    method: str = "sft"
    layers: int | None = None
    batch: tuple[int, int] | None = None
    documents: tuple[int, ...] = ()
    prefix: tuple[int, int] | None = None
    completions: bool = False
    prompts: tuple[int, int] = PROMPTS
    run: int = 0
    engine: str = ""
    sides: tuple[str, ...] = USUAL
    accumulated: int = 1
    cap: float = 0.0

    @property
    def is_online(self) -> bool:
        """Whether its trainer generates: the learner alone is timed."""
        return self.method in ("grpo", "rloo")

    @property
    def depth(self) -> str:
        """Decoder layers, and those of the public model: ``4 of 24``."""
        if self.model in IMAGE_MODELS:
            return "{0} of {0}".format(IMAGE_MODELS[self.model].text["num_hidden_layers"])
        shape = shape_of(self.model).cut_to(self.layers)
        return f"{shape.layers} of {shape.published_layers}"

    def stretched_to(self, tokens: int, cap: float) -> Row:
        """Return the row with so many tokens, in documents of `LONGEST_DOCUMENT` tokens or the rest, under a cap."""
        whole, rest = divmod(tokens, LONGEST_DOCUMENT)
        lengths = [LONGEST_DOCUMENT] * whole + [rest] * bool(rest)
        return replace(self, tokens=tokens, documents=tuple(lengths), cap=cap)

    def arguments(self, device: str) -> dict[str, Any]:
        """Return the arguments of both trainers' configurations."""
        batch, accumulated = self.batch or (1, self.accumulated)
        found: dict[str, Any] = {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "bf16": device == "cuda",
            "use_cpu": device != "cuda", "max_steps": self.run or RUN, "logging_steps": 10, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True, "learning_rate": 1e-4,
            "gradient_checkpointing": self.model != "narrow",
        }  # fmt: skip
        if self.is_online:
            online = {"gradient_accumulation_steps": MICRO_BATCHES, "num_generations": GROUP, "beta": 0.0}
            return found | online | {"max_completion_length": COMPLETIONS[1], "learning_rate": 1e-5}
        if self.model in IMAGE_MODELS:
            in_order = {"train_sampling_strategy": "sequential"} if self.case == "images" else {}
            workers = {"dataloader_num_workers": 4 if device == "cuda" else 0}
            return found | in_order | workers | {"max_length": None}
        found["max_length"] = self.tokens
        if self.method == "sft":
            found |= {"router_aux_loss_coef": 0.0} if self.kind == "nf4-experts" else {}  # the router is frozen
            in_order = {"train_sampling_strategy": "sequential"} if self.documents and not self.engine else {}
            return found | {"packing": self.batch is None} | in_order
        if self.method != "reward" and device == "cuda":  # the loss moves with what long sums lose in bf16
            found["beta"] = 0.01
        return found | {"learning_rate": 1e-5}

    def material(self, device: str, seed: int) -> dict[str, Any]:
        """Return the trainer's model, data, tokenizer and adapters."""
        if self.model in IMAGE_MODELS:
            return image_material(self.model, self.kind, self.tokens, device, seed)
        model, peft_config = self.model_and_adapters(device, seed)
        limit_memory(self.cap)
        tokenizer, examples = self.examples(int(model.config.get_text_config().vocab_size), seed)
        found = {"model": model, "processing_class": tokenizer, "train_dataset": examples, "peft_config": peft_config}
        return found | ({"reward_funcs": len} if self.is_online else {})  # never called: rewards are made up too

    def model_and_adapters(self, device: str, seed: int) -> tuple[Any, Any]:
        """Return the model, and the adapters that a trainer is to add."""
        from peft import LoraConfig, get_peft_model

        weights = torch.bfloat16 if device == "cuda" else torch.float32
        shape = replace(shape_of(self.model).cut_to(self.layers), weights=weights)
        reward = self.method == "reward"
        model = build_model(shape, positions=max(self.tokens, 1024), seed=seed, device=device, reward=reward)
        if self.kind == "full":
            return model, None
        if self.kind == "nf4-experts":
            quantize_experts(model.requires_grad_(False))
        make = partial(LoraConfig, r=RANK, lora_alpha=ALPHA, task_type="SEQ_CLS" if reward else "CAUSAL_LM")
        if self.kind == "experts":
            return model, make(target_modules=list(ATTENTION), target_parameters=list(STACKS))
        if self.kind in ("frozen", "nf4-experts"):
            return model, make(target_modules=list(ATTENTION))
        if self.kind != "nf4":
            return model, make(target_modules="all-linear" if self.case == "hybrid" else list(PROJECTIONS))
        quantize(model, device)
        adapted = get_peft_model(model, make(target_modules=list(PROJECTIONS)))
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
        return adapted, None

    def examples(self, vocabulary: int, seed: int) -> tuple[Any, datasets.Dataset]:
        """Return the tokenizer and the data set."""
        batch, accumulated = self.batch or (1, 1)
        rows = RUN * batch * accumulated * (2 if self.engine else 1)
        if self.method != "sft":
            return word_tokenizer(vocabulary), self._preferences(rows, min(vocabulary, 8192), seed)
        if self.prefix is not None:
            return word_tokenizer(vocabulary), self._prefixed(20 * self.tokens, vocabulary, seed)
        if self.documents:
            count = 20 if self.batch is None else 20 * batch * accumulated // len(self.documents)
            ids = random_ids([*self.documents] * count, vocabulary, seed)
            return word_tokenizer(vocabulary), datasets.Dataset.from_dict({"input_ids": ids})
        length = self.tokens * (rows if self.batch is None else rows // 2)
        return source_text(length, vocabulary, min(self.tokens, LONGEST_DOCUMENT))

    def _prefixed(self, tokens: int, vocabulary: int, seed: int) -> datasets.Dataset:
        assert self.prefix is not None
        shared, own = self.prefix
        draw = random.Random(seed)
        lengths = [draw.randint(own // 2, own * 3 // 2) for _ in range(tokens // (shared + own) + 1)]
        prefix, *owns = random_ids([shared, *lengths], vocabulary, seed)
        first = [-100] * shared if self.completions else prefix
        return datasets.Dataset.from_dict(
            {"input_ids": [prefix + ids for ids in owns], "labels": [first + ids for ids in owns]}
        )

    def _preferences(self, count: int, vocabulary: int, seed: int) -> datasets.Dataset:
        draw = random.Random(seed)

        def words(least: int, most: int) -> str:
            return " ".join(f"t{draw.randrange(4, vocabulary)}" for _ in range(draw.randint(least, most)))

        answers = COMPLETIONS if self.prompts == PROMPTS else (8, 12)
        prompts = [f"{words(*self.prompts)} " for _ in range(count)]
        if self.is_online:
            return datasets.Dataset.from_dict({"prompt": prompts})
        chosen, rejected = ([words(*answers) for _ in range(count)] for _ in range(2))
        if self.method == "kto":
            labels = [bool(index % 2) for index in range(count)]
            return datasets.Dataset.from_dict({"prompt": prompts, "completion": chosen, "label": labels})
        return datasets.Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


UNEQUAL = (321, 300, 280, 250, 230, 220, 200, 167, 80)
NARROW, SHORT = (16, 64, 48), (93, 231, 144, 68, 187, 120, 210, 77)
LONG = (1883, 1400, 1100, 900, 800, 700, 500, 400, 300, 209)
_MODELS = (
    ("qwen3-0.6b", "lora", 2048), ("qwen3-0.6b", "lora", 8192), ("llama-3.2-1b", "full", 4096), ("small", "lora", 512),
    ("qwen3-8b", "lora", 4096), ("qwen3-8b", "nf4", 4096), ("qwen3-14b", "nf4", 4096), ("gpt-oss-20b", "experts", 4096),
    ("qwen3-30b-a3b", "experts", 4096), ("small", "lora", 4096), ("small", "lora", 8192),
    ("tiny-qwen3", "full", 256), ("tiny-qwen3", "nf4", 256), ("tiny-gpt-oss", "experts", 256),
    ("tiny-gpt-oss", "nf4-experts", 256), ("llama-3.2-1b", "full", 2048), ("qwen3-0.6b", "full", 2048),
    ("qwen3-8b", "full", 4096),
    ("gpt-oss-20b", "nf4-experts", 4096), ("small-qwen3-moe", "experts", 512), ("small-gpt-oss", "experts", 512),
)  # fmt: skip
_SIDES = "trl", "fastpack same memory", "fastpack"
ROWS = {f"{model} {kind} {tokens}": Row("sft", model, tokens, kind) for model, kind, tokens in _MODELS}
for _model, _batch, _tokens in (
    ("qwen3-0.6b", (2, 4), 1024), ("qwen3-8b", (2, 4), 1024), ("small", (2, 4), 512), ("small", (1, 8), 512),
    ("small", (4, 1), 512),
):  # fmt: skip
    ROWS[f"{_model} lora {_batch[0]}x{_batch[1]}"] = Row("sft", _model, _tokens, batch=_batch)
for _model, _layers in {
    "qwen3-0.6b": None, "qwen3-8b": 12, "small, large vocabulary": None, "tiny-qwen3": None,
}.items():  # fmt: skip
    _name, _examples = _model.partition(",")[0], 4 if _layers else 8
    for _method in METHODS.keys() - {"sft"}:
        ROWS[f"{_method} {_name} {_examples}"] = Row(
            "preference", _model, 1024, method=_method, layers=_layers, batch=(_examples, 1), sides=PAIR
        )
for _model, _layers in {"gpt-oss-20b": 24, "qwen3-30b-a3b": 48}.items():
    for _tokens in (4096, 8192):
        _row = Row("sft", _model, _tokens, "experts", layers=_layers, sides=_SIDES)
        ROWS[f"{_model} whole experts {_tokens}"] = _row
for _model in IMAGE_MODELS:
    for _count in (4, 8):
        _row = Row("images", _model, 1200, batch=(_count, 1), sides=_SIDES)
        ROWS[f"images {_model} lora {_count}"] = _row
        ROWS[f"images {_model} full {_count}"] = replace(_row, kind="full")
        _whole = replace(_row, case="start", run=20, sides=(*PAIR, "fastpack warm caches"))
        ROWS[f"start images {_model} lora {_count}, 20 steps"] = _whole
        ROWS[f"ddp images {_model} lora {_count}"] = replace(_row, case="several_gpus", engine="ddp", sides=PAIR)
_SMALL = Row("preference", "small, large vocabulary", 1024, method="dpo", batch=(4, 1), sides=PAIR)
ROWS |= {
    "dpo small 4": _SMALL,
    "dpo small 1 short": replace(_SMALL, batch=(1, 1), prompts=(10, 10)),
    "hybrid delta": Row("hybrid", "small-delta", 321, "full", batch=(9, 1), documents=UNEQUAL, sides=PAIR),
    "hybrid qwen3.5-4b": Row("hybrid", "qwen3.5-4b", 1883, batch=(10, 1), documents=LONG, sides=PAIR),
    "hybrid qwen3.5-9b 2x4": Row(
        "hybrid", "qwen3.5-9b", 2048, batch=(2, 4), documents=(2048,) * 8,
        sides=(*PAIR, "trl flash-linear-attention", "fastpack flash-linear-attention"),
    ),
    "hybrid tiny": Row("hybrid", "tiny-delta", 40, "full", batch=(3, 1), documents=(40, 30, 20), sides=PAIR),
    "host narrow 128x1": Row("host", "narrow", 128, documents=NARROW, sides=PAIR),
    "host narrow 128x4": Row("host", "narrow", 128, documents=NARROW, sides=PAIR, accumulated=4),
    "narrow lora 1x8": Row("host", "narrow", 240, batch=(1, 8), documents=SHORT, sides=PAIR),
}  # fmt: skip
for _name, _prefix in {"300+300": (300, 300), "1000+200": (1000, 200), "nothing": (0, 400), "tiny": (40, 20)}.items():
    _row = Row("prefixes", "small", 8192, "full", prefix=_prefix, sides=("fastpack whole documents", "fastpack"))
    ROWS |= {f"prefix {_name}": _row, f"prefix {_name} completions": replace(_row, completions=True)}
ROWS["prefix tiny"] = replace(ROWS["prefix tiny"], model="tiny-qwen3", tokens=256)
_BY_ITSELF = {"metadata": ("metadata per layer", "metadata once", "packed kernel"), "ddp": USUAL, "fsdp2": USUAL}
"""Sides of a row of SFT under another name: ``metadata qwen3-0.6b full 2048``."""
for _name, _row in [*ROWS.items()]:
    if _row.case == "sft":
        for _case, _sides in _BY_ITSELF.items():
            _engine = _case if _case in ("ddp", "fsdp2") else ""
            _of = "several_gpus" if _engine else _case
            ROWS[f"{_case} {_name}"] = replace(_row, case=_of, sides=_sides, engine=_engine)
        for _steps in (20, 100):
            _start = replace(_row, case="start", run=_steps, sides=(*PAIR, "fastpack warm caches"))
            ROWS[f"start {_name}, {_steps} steps"] = _start
_UNEVEN = Row("several_gpus", "qwen3-0.6b", 16_384, documents=(16_384, *[4096] * 4), engine="ddp", sides=PAIR)
ROWS |= {
    "ddp uneven 16384": _UNEVEN,
    "ddp uneven tiny": replace(_UNEVEN, model="tiny-qwen3", tokens=256, documents=(256, *[64] * 4)),
}
_BUFFERS = "fastpack one buffer", "fastpack two buffers", "fastpack same memory", "trl offload"
ROWS["reload qwen3-8b 49152"] = Row("reload", "qwen3-8b", 49_152, layers=12, sides=_BUFFERS)
_ROUTING = "expert by expert", "one sort", "fastpack same memory"
for _model, _tokens in (("gpt-oss-20b", 2048), ("gpt-oss-20b", 8192), ("tiny-gpt-oss", 64)):
    ROWS[f"routing {_model} frozen {_tokens}"] = Row("routing", _model, _tokens, "frozen", sides=_ROUTING)
