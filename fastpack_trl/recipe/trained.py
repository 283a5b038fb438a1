"""What a run has left, a model or an adapter, for the commands after training: loaded, merged, asked."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, preparing, shown
from fastpack_trl.model.preflight import check_weights, file_fault
from fastpack_trl.recipe.adapters import check_runs, merge_adapter, resize_to_adapter, with_adapter
from fastpack_trl.recipe.arguments import parse
from fastpack_trl.recipe.make_trainer import check_model, method_of_run
from fastpack_trl.recipe.methods import METHODS, SFT
from fastpack_trl.recipe.paths import model_folder

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Trained:
    """A model, or an adapter and the model that it is for."""

    folder: str
    base: str | None = None
    """The model of an adapter; None where `folder` is a model."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of `from_pretrained`."""
    quantization: Any = None
    """How the base was quantised while the adapter was trained."""
    classifies: bool = False

    def tokenizer(self) -> Any:
        """Load the tokenizer that lies beside the adapter or model, else that of the base."""
        from transformers import AutoTokenizer

        there = (Path(self.folder) / "tokenizer_config.json").is_file() or self.base is None
        code = self.options["trust_remote_code"]
        with preparing():
            return AutoTokenizer.from_pretrained(self.folder if there else self.base, trust_remote_code=code)

    def load(self, *, dequantised: bool) -> tuple[Any, str]:
        """Return the model, in evaluation mode, and a line on what had to change; an adapter over its base.

        Args:
            dequantised: a base in four or eight bits becomes dense, with the values that it had in training.
        """
        with preparing():
            options = self.options | ({"num_labels": 1} if self.classifies else {})
            options |= {"quantization_config": self.quantization} if self.quantization is not None else {}
            for loads in self._classes():
                model = loads.from_pretrained(self.base or self.folder, **options)
                if dequantised and getattr(model, "hf_quantizer", None) is not None:
                    model = model.dequantize()
                if self.base is None:
                    return model.eval(), ""
                resized = resize_to_adapter(model, Path(self.folder), self.tokenizer)
                if (adapted := with_adapter(model, self.folder)) is not None:
                    return adapted.eval(), resized
        raise UserError(
            f"the adapter {shown(self.folder)} lacks weights that one over '{self.base}' has: name the model that it "
            "was trained over with --base DIR"
        )

    def _classes(self) -> list[Any]:
        """Return what the model may have been trained as: TRL takes the checkpoint's class, scripts the auto class.

        If it has a vision tower they may differ (qwen3_5, llama4), and so do the names of their layers.
        """
        import transformers

        if self.classifies:
            return [transformers.AutoModelForSequenceClassification]
        keywords = {name: self.options.get(name) for name in ("revision", "trust_remote_code")}
        config = transformers.AutoConfig.from_pretrained(self.base or self.folder, **keywords)
        auto, mapping = transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        named = getattr(transformers, config.architectures[0], auto)
        return [named] if named in (auto, mapping.get(type(config), named)) else [named, auto]


def add_trained(parser: ArgumentParser) -> None:
    """Add the options that say what was trained."""
    add = parser.add_argument
    add("model", metavar="DIR", nargs="?", help="what a run has left: the folder of an adapter or of a model")
    add("--config", metavar="FILE", help="the YAML of that run: its output_dir, model and quantisation")
    add("--base", metavar="DIR", help="the model of the adapter (default: the one that the adapter names)")
    add("--load_in_4bit", action="store_true", help="the adapter was trained over a base in NF4 (--config knows it)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="of the weights (default: that of the checkpoint)")
    add("--trust_remote_code", action="store_true", help="run code that comes with the checkpoint (default: never)")


def find_trained(args: Namespace) -> Trained:
    """Return what the options of `add_trained` name.

    Raises:
        UserError: nothing is named, or no model or adapter lies there.
    """
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    folder, base, quantization = args.model, args.base, None
    if args.config:
        from trl import get_quantization_config

        words = ["--config", args.config, "--bf16", "False"]  # nothing is trained: no GPU is needed
        with preparing():
            arguments = parse(words, method_of_run(args.config), may_launch=False)
        folder = folder or str(arguments.training.output_dir)
        base = base or arguments.model.model_name_or_path
        options |= {"revision": arguments.model.model_revision}
        options["trust_remote_code"] |= bool(arguments.training.trust_remote_code)
        quantization = get_quantization_config(arguments.model)
    if not folder:
        raise UserError("no model: name the folder that a run has written, or give its YAML with --config FILE")
    if args.load_in_4bit:
        import torch
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if folder.endswith((".yaml", ".yml")):
        raise UserError(f"{folder} is no model; did you mean --config {folder}?")
    path = Path(folder).expanduser()
    if not (path / _ADAPTER).is_file():
        inside = sorted(path.glob(f"*/{_ADAPTER}"), key=lambda file: file.stat().st_mtime)
        if inside and not (path / "config.json").is_file():  # of a run that was ended: its newest checkpoint
            raise UserError(f"no adapter or model lies in {shown(folder)}; did you mean '{inside[-1].parent}'?")
        name = model_folder("the model", folder)
        with preparing():
            check_model(name, options, "the model")
        return Trained(name, None, options)
    if any(path.glob("model*.safetensors")):
        raise UserError(f"{shown(folder)} holds an adapter and a model, of two runs: move one away")
    if fault := file_fault(path / _ADAPTER):
        raise UserError(f"the adapter {shown(folder)} cannot be loaded: {fault}; copy or download it again")
    about = json.loads((path / _ADAPTER).read_text(encoding="utf-8"))
    named = about.get("base_model_name_or_path")
    if named and base and not args.base and _are_apart(named, base):  # the run's command line had another one
        raise UserError(
            f"the adapter {shown(folder)} is for '{named}', {args.config} names '{base}': say which with --base DIR"
        )
    if not (name := base or named):
        raise UserError(f"the adapter {shown(folder)} names no model: name the one that it is for with --base DIR")
    option = "--base" if base else "the adapter's model (--base names another)"
    name, classifies = model_folder(option, name), about.get("task_type") == "SEQ_CLS"
    with preparing():
        check_model(name, options, option, METHODS["reward"] if classifies else SFT)
        check_weights(str(path), "the adapter")
    return Trained(str(path), name, options, quantization, classifies)


def _are_apart(named: str, other: str) -> bool:
    """Return whether two names are surely of two models; a folder that is gone may have moved to the other."""
    there = [Path(each).is_dir() for each in (named, other)]
    return not Path(named).samefile(other) if all(there) else not any(there) and named != other


def merge(found: Trained, output: Path) -> str:
    """Write a model with the adapter in its weights, and the tokenizer; return what it was merged into, and how.

    Raises:
        UserError: there is no adapter, or its weights are not finite.
    """
    if found.base is None:
        raise UserError(f"{found.folder} is a whole model: nothing is left to merge")
    tokenizer, (model, resized) = found.tokenizer(), found.load(dequantised=True)
    with preparing():
        merged, untied = merge_adapter(model)
        merged.save_pretrained(output)
        tokenizer.save_pretrained(output)
    into = f"{found.base}{' as it was in training: quantised, then made dense' if found.quantization else ''}"
    return "\n".join(filter(None, (into, resized, untied)))


def answers(
    found: Trained, prompts: Sequence[str], *, max_new_tokens: int, temperature: float, seed: int, template: bool
) -> Iterator[dict[str, str]]:
    """Yield ``{"prompt", "base", "adapter"}`` for each prompt, or ``{"prompt", "model"}`` for a whole model.

    Args:
        prompts: text; with `template` it is what a user says in the model's chat template, where it has one.
        temperature: 0 takes the likeliest token each time.
        seed: of each answer's random numbers.
    """
    import torch
    from transformers import set_seed

    if found.classifies:
        raise UserError(f"{found.folder} is of a reward model, which scores a text and writes none")
    tokenizer, (model, _) = found.tokenizer(), found.load(dequantised=False)
    if found.base is not None:
        check_runs(model.get_base_model())
    if torch.cuda.is_available() and found.quantization is None:
        model = model.to("cuda")
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    sides = {"model": nullcontext} if found.base is None else {"base": model.disable_adapter, "adapter": nullcontext}
    for prompt in prompts:
        text: Any = prompt
        if template and tokenizer.chat_template:
            turns = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=text is prompt).to(model.device)
        if not tokens["input_ids"].numel():
            raise UserError(f"the prompt {shown(prompt)} has no tokens: write some text")
        row = {"prompt": prompt}
        for side, around in sides.items():
            set_seed(seed)
            with around(), torch.no_grad():
                pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
                out = model.generate(**tokens, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
            row[side] = tokenizer.decode(out[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        yield row
