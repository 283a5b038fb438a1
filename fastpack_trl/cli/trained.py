"""``fastpack-trl merge`` and ``generate``: merge the adapter of a run into its model, or prompt it."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, command_line, one_line, preparing, short_repr
from fastpack_trl.recipe.adapters import check_runs, merge_adapter, resize_to_adapter, with_adapter
from fastpack_trl.recipe.arguments import parse
from fastpack_trl.recipe.make_trainer import check_model, method_of_run
from fastpack_trl.recipe.methods import METHODS, SFT
from fastpack_trl.recipe.paths import model_folder
from fastpack_trl.recipe.yaml import load_config

_ADAPTER, _TOKENIZER, _OLD_TEMPLATE = "adapter_config.json", "tokenizer_config.json", "chat_template.json"
_REST = ["*processor_config.json", "audio_tokenizer_config.json", "*_tokenizer/*.*", _OLD_TEMPLATE]
_CODE = ["*.py", "custom_generate/*.*"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``merge`` or ``generate``: the last word of the parser's program says which."""
    add = parser.add_argument
    add("model", metavar="DIR", nargs="?", help="what a run has saved: the folder of an adapter or of a model")
    add("--config", metavar="FILE", help="the YAML of that run: its output_dir, model and quantization")
    add("--base", metavar="DIR", help="the adapter's base model (default: the one that the adapter names)")
    add("--load_in_4bit", action="store_true", help="the adapter was trained on a base in NF4 (--config knows it)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights (default: that of the checkpoint)")
    add("--trust_remote_code", action="store_true", help="run code that comes with the checkpoint (default: never)")
    if parser.prog.endswith(" merge"):
        add("--output", metavar="DIR", help="where to write it (default: the adapter's folder + -merged)")
        add("--push_to_hub", metavar="NAME", help="also push it to the hub under this name")
        return
    prompt_help = "a user's message, or a text to continue if there is no chat template; may be repeated"
    add("--prompt", metavar="TEXT", action="append", help=prompt_help)
    add("--max_new_tokens", metavar="N", type=int, default=128, help="longest answer (default: %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0, the default, takes the likeliest token")


def run(args: Namespace, record: dict[str, Any]) -> int:
    """Merge or generate."""
    record |= _merge(args) if args.command == "merge" else _generate(args)
    return 0


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run has left: a model, or an adapter (then `base` is its model)."""

    folder: str
    base: str | None
    source: dict[str, Any]
    """Keywords of `from_pretrained`, also of its config: ``revision`` and ``trust_remote_code``."""
    options: dict[str, Any]
    """Further ones."""
    classifies: bool

    def tokenizer(self) -> Any:
        """Load the tokenizer saved with the adapter or model, else that of the base."""
        from transformers import AutoTokenizer

        has_own = (Path(self.folder) / _TOKENIZER).is_file() or self.base is None
        source, code = self.folder if has_own else self.base, self.source["trust_remote_code"]
        with preparing(what=f"the tokenizer in {short_repr(source)}"):
            return AutoTokenizer.from_pretrained(source, trust_remote_code=code)

    def copy_rest(self, output: Path) -> None:
        """Copy what else the folder of an adapter, then its base, has: processors, old templates, remote code."""
        from huggingface_hub import snapshot_download

        kinds = _REST + _CODE * self.source["trust_remote_code"]
        for source in (self.folder, str(self.base)):
            if not (folder := Path(source)).is_dir():
                folder = Path(snapshot_download(source, revision=self.source["revision"], allow_patterns=kinds))
            for file in (file for kind in kinds for file in folder.glob(kind)):
                if not (target := output / file.relative_to(folder)).exists():
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
            if (folder / _TOKENIZER).is_file():  # the base's old template would take precedence over that of a run
                kinds = [kind for kind in kinds if kind != _OLD_TEMPLATE]

    def load(self, *, dequantized: bool) -> tuple[Any, str]:
        """Return the model in evaluation mode, an adapter over its base, and a line on a change of its size.

        `dequantized`: a base in four or eight bits is converted to dense weights of the same values.
        """
        from fastpack_trl.model.preflight import check_weights

        name, adapter = self.base or self.folder, f"the adapter {short_repr(self.folder)}"
        other = "give the model that it was trained on with --base DIR, or copy the adapter again"
        check_weights(name, "the model")
        for model_class in self._classes():
            with preparing(what=f"the model {short_repr(name)}"):
                model, keys = model_class.from_pretrained(name, output_loading_info=True, **self.source, **self.options)
                if keys["missing_keys"] and not self.classifies:  # the adapter of a classifier has its head
                    raise KeyError(f"it has no {short_repr(sorted(keys['missing_keys']))}")
                if dequantized and getattr(model, "hf_quantizer", None) is not None:
                    model = model.dequantize()
            if self.base is None:
                return model.eval(), ""
            with preparing(what=adapter, remedy=other):
                resized = resize_to_adapter(model, Path(self.folder), self.tokenizer)
                adapted = with_adapter(model, self.folder)
            if adapted is not None:
                return adapted.eval(), resized
        raise UserError(f"{adapter} has no weights for some layers of {short_repr(name)}, or more than it has: {other}")

    def _classes(self) -> list[Any]:
        """Return the possible classes of the trained model: TRL takes the checkpoint's class, scripts the auto class.

        If it has a vision tower they may differ (qwen3_5, llama4), and so do the names of their layers.
        """
        import transformers

        if self.classifies:
            return [transformers.AutoModelForSequenceClassification]
        config = transformers.AutoConfig.from_pretrained(self.base or self.folder, **self.source)
        auto, mapping = transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        named = getattr(transformers, config.architectures[0], auto)
        return [named] if named in (auto, mapping.get(type(config), named)) else [named, auto]


def _find(args: Namespace) -> Trained:
    """Return the model or adapter that the options name; raise `UserError` if there is none."""
    source, options = {"revision": "main", "trust_remote_code": args.trust_remote_code}, {"dtype": args.dtype}
    folder, base = _of_config(args, source, options) if args.config else (args.model, args.base)
    if not folder:
        raise UserError("no model: give the folder that a run has written, or its YAML with --config FILE")
    if folder.endswith((".yaml", ".yml")):
        raise UserError(f"{folder} is a YAML; did you mean --config {folder}?")
    path = Path(folder).expanduser()
    is_adapter, classifies = (path / _ADAPTER).is_file(), False
    option, name = "the model", folder
    if is_adapter:
        option, name, classifies = _base_of(path, base, args)
    elif (inside := list(path.glob(f"*/{_ADAPTER}"))) and not (path / "config.json").is_file():
        newest = max(inside, key=lambda file: file.stat().st_mtime).parent  # of a run that was ended
        raise UserError(f"{short_repr(folder)} has no adapter or model; did you mean '{newest}'?")
    elif args.config and not args.model:
        _check_left(folder, args.config)
    name = model_folder(option, name)
    check_model(name, source, option, METHODS["reward"] if classifies else SFT)
    if not is_adapter:
        if args.load_in_4bit:
            raise UserError(f"--load_in_4bit is for the base of an adapter, and {short_repr(name)} is a full model")
        options.pop("quantization_config", None)  # a whole model's own config says how it is stored
        return Trained(name, None, source, options, False)
    from fastpack_trl.model.preflight import check_weights

    check_weights(str(path), "the adapter")
    if args.load_in_4bit:
        from transformers import BitsAndBytesConfig

        types = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **types)
    return Trained(str(path), name, source, options | ({"num_labels": 1} if classifies else {}), classifies)


def _check_left(folder: str, config: str) -> None:
    """Raise `UserError` if the run of a YAML has left no model and no adapter in a folder."""
    kinds = (f"{start}{name}" for start in ("", "*/") for name in ("config.json", _ADAPTER))
    if not any(file for kind in kinds for file in Path(folder).expanduser().glob(kind)):
        command = command_line(method_of_run(config).command, "--config", config)
        raise UserError(f"no trained model in {short_repr(folder)}: run {command} first")


def _of_config(args: Namespace, source: dict[str, Any], options: dict[str, Any]) -> tuple[str, str | None]:
    """Return folder and base of a YAML's run; put how the run loaded its model into `source` and `options`."""
    if (output := load_config(args.config).get("output_dir")) and not args.model:
        _check_left(str(output), args.config)  # at once: nothing heavy is imported yet
    words = ["--config", args.config, "--bf16", "False"]  # nothing is trained: no GPU is needed
    arguments = parse(words, method_of_run(args.config), may_launch=False)
    from trl import get_quantization_config

    source["revision"] = arguments.model.model_revision
    source["trust_remote_code"] |= bool(arguments.training.trust_remote_code)
    if (quantization := get_quantization_config(arguments.model)) is not None:
        options["quantization_config"] = quantization
    return args.model or str(arguments.training.output_dir), args.base or arguments.model.model_name_or_path


def _base_of(path: Path, base: str | None, args: Namespace) -> tuple[str, str, bool]:
    """Return where the name of an adapter's base comes from, that name, and whether the adapter is a reward model's."""
    from fastpack_trl.model.preflight import file_fault

    shown = short_repr(str(path))
    if any(path.glob("model*.safetensors")):
        raise UserError(f"{shown} contains both an adapter and a full model, from two runs: move one out")
    if fault := file_fault(path / _ADAPTER):
        raise UserError(f"the adapter {shown} cannot be loaded: {fault}; copy or download it again")
    about = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))
    named = about.get("base_model_name_or_path")
    if named and base and not args.base:  # the run's command line may have named another one than its YAML
        there = [Path(each).is_dir() for each in (named, base)]  # a folder that is gone may have moved
        if not Path(named).samefile(base) if all(there) else not any(there) and named != base:
            raise UserError(f"adapter {shown} is for '{named}', {args.config} names '{base}': choose with --base DIR")
    if not (name := base or named) or not isinstance(name, str):
        raise UserError(f"the adapter {shown} does not name its base model: give --base DIR")
    option = "--base" if base else "the adapter's model (--base names another)"
    return option, name, about.get("task_type") == "SEQ_CLS"


def _merge(args: Namespace) -> dict[str, Any]:
    """Write a model with the adapter in its weights, and the tokenizer; name what comes next."""
    with preparing():
        trained = _find(args)
        from fastpack_trl.model.preflight import unwritable

        if trained.base is None:
            raise UserError(
                f"{short_repr(trained.folder)} is a full model: use it as it is, or name the folder of an adapter"
            )
        output = Path(args.output or f"{trained.folder.rstrip('/')}-merged").expanduser()
        if output.is_dir() and any(output.iterdir()):
            raise UserError(f"--output {output} is not empty: name another folder")
        if reason := unwritable(output):
            raise UserError(f"--output {output}: {reason}")
        for source in (trained.folder, trained.base):
            if Path(source).is_dir() and output.resolve().is_relative_to(Path(source).resolve()):
                raise UserError(f"--output {output} is inside of {source}, which stays as it is: name another folder")
        tokenizer, (model, resized) = trained.tokenizer(), trained.load(dequantized=True)
        merged, untied = merge_adapter(model)
        for part in (merged, tokenizer):
            part.save_pretrained(output)
        trained.copy_rest(output)
    how = ", as during training: quantized, then dequantized" if "quantization_config" in trained.options else ""
    what = f"merged {trained.folder} with its base {trained.base} (both unchanged){how}"
    print("\n".join(map(one_line, filter(None, (what, resized, untied, f"written: {output}")))))
    if args.push_to_hub:
        from huggingface_hub import create_repo, upload_folder

        with preparing():
            name = create_repo(args.push_to_hub, exist_ok=True).repo_id
            upload_folder(repo_id=name, folder_path=output)
        print(f"pushed: {name}")
    print(f"try it: {command_line('generate', output, '--prompt', 'Hello')}")
    return {"adapter": trained.folder, "base": trained.base, "merged": str(output)}


def turn_of(tokenizer: Any, prompt: str) -> str:
    """Return a prompt in the chat template; some templates of models for images read parts of a turn, and no text."""
    texts, faults = list[str](), list[Exception]()
    for content in (prompt, [{"type": "text", "text": prompt}]):
        turns = [{"role": "user", "content": content}]
        try:
            texts.append(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # noqa: BLE001 - of the template, whatever it is
            faults.append(error)
    if not texts:
        raise faults[0]
    return next((text for text in texts if prompt.strip() in text), texts[0])


def _generate(args: Namespace) -> dict[str, Any]:
    """Print each prompt with the answer of the model, or with those of the base and of the adapter."""
    if not args.prompt or not all(args.prompt):
        raise UserError("give --prompt TEXT, once per prompt")
    for name, least in (("max_new_tokens", 1), ("temperature", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)} must be >= {least}")
    with preparing():
        trained = _find(args)
    if trained.classifies:
        raise UserError(f"{trained.folder} is a reward model: it scores text and cannot generate")
    import torch

    with preparing():
        tokenizer, (model, _) = trained.tokenizer(), trained.load(dequantized=False)
    if trained.base is not None:
        check_runs(model.get_base_model())
    if torch.cuda.is_available() and "quantization_config" not in trained.options:
        model = model.to("cuda")
    variants = {"base": model.disable_adapter, "adapter": nullcontext} if trained.base else {"model": nullcontext}
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    settings = {"max_new_tokens": args.max_new_tokens, "pad_token_id": padding, "do_sample": args.temperature > 0}
    settings |= {"temperature": args.temperature} if args.temperature else {}
    rows = []
    for prompt in args.prompt:
        template = tokenizer.chat_template
        with preparing(what=f"the chat template in {short_repr(trained.folder)}"):
            text = turn_of(tokenizer, prompt) if template else prompt
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not template)
        if (tokens["input_ids"] >= model.get_input_embeddings().weight.shape[0]).any():
            raise UserError(f"the tokenizer in {short_repr(trained.folder)} is of another model: it has more tokens")
        if not (start := tokens["input_ids"].shape[1]):
            raise UserError(f"the prompt {short_repr(prompt)} has no tokens: write some text")
        row = {"prompt": prompt}
        for name, around in variants.items():
            with around(), torch.no_grad():
                out = model.generate(**tokens.to(model.device), **settings)
            row[name] = tokenizer.decode(out[0, start:], skip_special_tokens=True)
        print("\n".join(f"{name}: {text.strip() or '(no text)'}" for name, text in row.items()), end="\n\n", flush=True)
        rows.append(row)
    return {"rows": rows, "max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
