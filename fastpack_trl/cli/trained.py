"""``fastpack-trl merge`` and ``generate``: merge the adapter of a run into its model, or prompt it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, preparing, short_repr
from fastpack_trl.recipe.paths import add_json, json_file, model_folder

_ADAPTER = "adapter_config.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``merge`` or ``generate``: the last word of the parser's program says which."""
    add = parser.add_argument
    add("model", metavar="DIR", nargs="?", help="what a run has saved: the folder of an adapter or of a model")
    add("--config", metavar="FILE", help="the YAML of that run: its output_dir, model and quantization")
    add("--base", metavar="DIR", help="the model of the adapter (default: the one that the adapter names)")
    add("--load_in_4bit", action="store_true", help="the adapter was trained over a base in NF4 (--config knows it)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights (default: that of the checkpoint)")
    add("--trust_remote_code", action="store_true", help="run code that comes with the checkpoint (default: never)")
    if parser.prog.endswith(" merge"):
        add("--output", metavar="DIR", help="where to write it (default: the adapter's folder + -merged)")
        add("--push_to_hub", metavar="NAME", help="also push it to the hub under this name")
        add_json(parser, "the folders")
        return
    prompt_help = "what a user says; without a chat template, a text to continue; may be repeated"
    add("--prompt", metavar="TEXT", action="append", help=prompt_help)
    add("--max_new_tokens", metavar="N", type=int, default=128, help="longest answer (default: %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0 takes the likeliest token (default)")
    add_json(parser, "prompts and answers")


def run(args: Namespace) -> int:
    """Merge or generate; write the JSON."""
    from fastpack_trl.measure.record import write_json

    file = json_file(args)
    record = _merge(args) if args.command == "merge" else _generate(args)
    if file is not None:
        write_json(file, record)
    return 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A model, or an adapter and the model that it is for."""

    folder: str
    base: str | None = None
    """The model of an adapter; None where `folder` is a model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `from_pretrained`."""
    classifies: bool = False

    def tokenizer(self) -> Any:
        """Load the tokenizer saved with the adapter or model, else that of the base."""
        from transformers import AutoTokenizer

        has_own = (Path(self.folder) / "tokenizer_config.json").is_file() or self.base is None
        code = self.options["trust_remote_code"]
        return AutoTokenizer.from_pretrained(self.folder if has_own else self.base, trust_remote_code=code)

    def load(self, *, dequantized: bool) -> tuple[Any, str]:
        """Return the model, in evaluation mode, and a line on what had to change; an adapter over its base.

        Args:
            dequantized: a base in four or eight bits becomes dense, with the values that it had in training.
        """
        from fastpack_trl.recipe.adapters import resize_to_adapter, with_adapter

        for model_class in self._classes():
            model = model_class.from_pretrained(self.base or self.folder, **self.options)
            if dequantized and getattr(model, "hf_quantizer", None) is not None:
                model = model.dequantize()
            if self.base is None:
                return model.eval(), ""
            resized = resize_to_adapter(model, Path(self.folder), self.tokenizer)
            if (adapted := with_adapter(model, self.folder)) is not None:
                return adapted.eval(), resized
        raise UserError(
            f"the adapter {short_repr(self.folder)} lacks weights that one over '{self.base}' has: name the model "
            "that it was trained over with --base DIR"
        )

    def _classes(self) -> list[Any]:
        """Return the possible classes of the trained model: TRL takes the checkpoint's class, scripts the auto class.

        If it has a vision tower they may differ (qwen3_5, llama4), and so do the names of their layers.
        """
        import transformers

        if self.classifies:
            return [transformers.AutoModelForSequenceClassification]
        config = transformers.AutoConfig.from_pretrained(self.base or self.folder, **_for_config(self.options))
        auto, mapping = transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        named = getattr(transformers, config.architectures[0], auto)
        return [named] if named in (auto, mapping.get(type(config), named)) else [named, auto]


def _for_config(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("revision", "trust_remote_code") if name in options}


def _find(args: Namespace) -> Trained:
    """Return the model or adapter that the options name; raise `UserError` if there is none."""
    from fastpack_trl.model.preflight import check_weights, file_fault
    from fastpack_trl.recipe.make_trainer import check_model
    from fastpack_trl.recipe.methods import METHODS, SFT

    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    folder, base = _of_config(args, options) if args.config else (args.model, args.base)
    if not folder:
        raise UserError("no model: name the folder that a run has written, or give its YAML with --config FILE")
    if folder.endswith((".yaml", ".yml")):
        raise UserError(f"{folder} is no model; did you mean --config {folder}?")
    if args.load_in_4bit:
        from transformers import BitsAndBytesConfig

        types = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **types)
    path, shown = Path(folder).expanduser(), short_repr(folder)
    if not (path / _ADAPTER).is_file():
        inside = sorted(path.glob(f"*/{_ADAPTER}"), key=lambda file: file.stat().st_mtime)
        if inside and not (path / "config.json").is_file():  # of a run that was ended: its newest checkpoint
            raise UserError(f"{shown} has no adapter or model; did you mean '{inside[-1].parent}'?")
        name = model_folder("the model", folder)
        check_model(name, _for_config(options), "the model")
        options.pop("quantization_config", None)  # a whole model says itself how it is stored
        return Trained(name, None, options)
    if any(path.glob("model*.safetensors")):
        raise UserError(f"{shown} holds an adapter and a model, of two runs: move one away")
    if fault := file_fault(path / _ADAPTER):
        raise UserError(f"the adapter {shown} cannot be loaded: {fault}; copy or download it again")
    about = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))
    named = about.get("base_model_name_or_path")
    if named and base and not args.base and _are_different(named, base):  # the run's command line had another one
        raise UserError(
            f"the adapter {shown} is for '{named}', {args.config} names '{base}': say which with --base DIR"
        )
    if not (name := base or named):
        raise UserError(f"the adapter {shown} names no model: name the one that it is for with --base DIR")
    option = "--base" if base else "the adapter's model (--base names another)"
    name, classifies = model_folder(option, name), about.get("task_type") == "SEQ_CLS"
    check_model(name, _for_config(options), option, METHODS["reward"] if classifies else SFT)
    check_weights(str(path), "the adapter")
    return Trained(str(path), name, options | ({"num_labels": 1} if classifies else {}), classifies)


def _of_config(args: Namespace, options: dict[str, Any]) -> tuple[str, str | None]:
    """Return folder and base of a YAML's run; how the run loaded its model goes into `options`."""
    from trl import get_quantization_config

    from fastpack_trl.recipe.arguments import parse
    from fastpack_trl.recipe.make_trainer import method_of_run

    words = ["--config", args.config, "--bf16", "False"]  # nothing is trained: no GPU is needed
    arguments = parse(words, method_of_run(args.config), may_launch=False)
    options["revision"] = arguments.model.model_revision
    options["trust_remote_code"] |= bool(arguments.training.trust_remote_code)
    if (quantization := get_quantization_config(arguments.model)) is not None:
        options["quantization_config"] = quantization
    return args.model or str(arguments.training.output_dir), args.base or arguments.model.model_name_or_path


def _are_different(named: str, other: str) -> bool:
    """Return whether two names are surely of two models; a folder that is gone may have moved to the other."""
    exist = [Path(each).is_dir() for each in (named, other)]
    return not Path(named).samefile(other) if all(exist) else not any(exist) and named != other


def _merge(args: Namespace) -> dict[str, Any]:
    """Write a model with the adapter in its weights, and the tokenizer; name what comes next."""
    from fastpack_trl.model.preflight import unwritable
    from fastpack_trl.recipe.adapters import merge_adapter

    with preparing():
        trained = _find(args)
    output = Path(args.output or f"{trained.folder.rstrip('/')}-merged").expanduser()
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output} is not empty: name another folder")
    if reason := unwritable(output):
        raise UserError(f"--output {output}: {reason}")
    if trained.base is None:
        raise UserError(f"{trained.folder} is a whole model: nothing is left to merge")
    with preparing():
        tokenizer, (model, resized) = trained.tokenizer(), trained.load(dequantized=True)
        merged, untied = merge_adapter(model)
        for part in (merged, tokenizer):
            part.save_pretrained(output)
    how = " as it was in training: quantized, then made dense" if "quantization_config" in trained.options else ""
    lines = [f"{trained.folder} merged into {trained.base}{how}", resized, untied, f"written: {output}"]
    print("\n".join(filter(None, lines)))
    if args.push_to_hub:
        with preparing():
            for part in (merged, tokenizer):
                part.push_to_hub(args.push_to_hub)
        print(f"pushed: {args.push_to_hub}")
    print(f"try it: fastpack-trl generate {output} --prompt 'Hello'")
    return {"adapter": trained.folder, "base": trained.base, "merged": str(output)}


def _generate(args: Namespace) -> dict[str, Any]:
    """Print each prompt with the answer of the model, or with those of the base and of the adapter."""
    if not args.prompt or not all(args.prompt):
        raise UserError("give --prompt TEXT, once per prompt")
    if args.max_new_tokens < 1 or args.temperature < 0:
        name, least = ("max_new_tokens", 1) if args.max_new_tokens < 1 else ("temperature", 0)
        raise UserError(f"--{name} {getattr(args, name)} must be >= {least}")
    with preparing():
        trained = _find(args)
    if trained.classifies:
        raise UserError(f"{trained.folder} is of a reward model, which scores a text and writes none")
    import torch

    from fastpack_trl.recipe.adapters import check_runs

    with preparing():
        tokenizer, (model, _) = trained.tokenizer(), trained.load(dequantized=False)
    if trained.base is not None:
        check_runs(model.get_base_model())
    if torch.cuda.is_available() and "quantization_config" not in trained.options:
        model = model.to("cuda")
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sides = {"model": nullcontext} if trained.base is None else {"base": model.disable_adapter, "adapter": nullcontext}
    limits, rows = {"max_new_tokens": args.max_new_tokens, "pad_token_id": pad}, []
    for prompt in args.prompt:
        tokens = tokenizer(prompt, return_tensors="pt")
        if tokenizer.chat_template:
            turns, form = [{"role": "user", "content": prompt}], {"return_dict": True, "return_tensors": "pt"}
            tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, **form)
        if not (start := tokens["input_ids"].shape[1]):
            raise UserError(f"the prompt {short_repr(prompt)} has no tokens: write some text")
        row = {"prompt": prompt}
        for side, around in sides.items():
            with around(), torch.no_grad():
                out = model.generate(**tokens.to(model.device), **limits, **sampling)
            row[side] = tokenizer.decode(out[0, start:], skip_special_tokens=True)
        print("\n".join(f"{name}: {text.strip() or '(no text)'}" for name, text in row.items()), end="\n\n", flush=True)
        rows.append(row)
    return {"rows": rows, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
