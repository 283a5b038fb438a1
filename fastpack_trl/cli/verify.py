"""``fastpack-trl verify``: load a model and prove that packed documents do not see each other in it."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import NonFiniteError, UserError, describe, did_you_mean, preparing
from fastpack_trl.recipe.paths import add_json, json_file, model_folder

if TYPE_CHECKING:
    from fastpack_trl.attention.proof import PackingProof

DTYPES = ("float32", "bfloat16", "float16", "auto")
DEVICES = ("auto", "cpu", "cuda")
_LARGEST_MATRIX = 10  # documents; above, the leaks are listed
_LISTED_LEAKS = 20
_NO_WINDOW = "nothing: no window of the model is longer than all documents"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl verify``; imports nothing heavy."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of a causal language model, or its hub name")
    add("--adapter", metavar="DIR", help="folder of a PEFT adapter for it, or its hub name")
    add(
        "--attn",
        metavar="NAME",
        default="auto",
        help="auto (what the trainer would choose), a backend such as per_document or sdpa, or off: "
        "stock as it is, which shows where stock leaks (default: auto)",
    )
    add(
        "--lengths",
        metavar="N",
        nargs="+",
        type=int,
        help="tokens of each document of the probe (default: 9 1 14 6, after one that exceeds the model's windows "
        "where it costs little)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights; float32 gives the sharpest comparison and takes 4 bytes per parameter, auto is that of "
        "the checkpoint (default: float32)",
    )
    add("--device", choices=DEVICES, default="auto", help="auto: CUDA where torch sees it, else the CPU")
    add_json(parser, "the result")
    add("--trust_remote_code", action="store_true", help="run code that comes with the checkpoint (default: never)")


def run(args: Namespace) -> int:
    """Load, prove, print.

    Returns:
        0 when no document sees another and packed results are those of separate documents, else 1, with the remedy on
        stderr.
    """
    lengths = None if args.lengths is None else tuple(args.lengths)
    if lengths and (len(lengths) < 2 or min(lengths) < 1):
        wrong = f"has a document of {min(lengths)} tokens" if min(lengths) < 1 else "is one document"
        raise UserError(
            f"--lengths {' '.join(map(str, lengths))} {wrong}: give two or more documents of 1 or more tokens each, "
            "e.g. --lengths 9 1 14 6"
        )
    if not args.model:
        raise UserError("no model: give --model a folder or a hub name")
    args.model = model_folder("--model", args.model)
    if args.adapter:
        args.adapter = model_folder("--adapter", args.adapter, "adapter_config.json")
    # Imported from here on: torch and transformers take seconds.
    from fastpack_trl.attention.backends import BACKENDS
    from fastpack_trl.attention.install import packed_attention
    from fastpack_trl.attention.proof import verify_packing
    from fastpack_trl.measure.record import versions, write_json
    from fastpack_trl.model.facts import UNREADABLE

    names = ("auto", *BACKENDS, "off")
    if args.attn not in names:
        raise UserError(
            f"--attn {args.attn!r} does not exist{did_you_mean(args.attn, names)} (names: {', '.join(names)})"
        )
    file = json_file(args)
    device = _device(args.device)
    model = _load(args)
    if next(iter(model.parameters())).device.type != device:  # a quantized model is where its kernels are
        model = model.to(device)
    if lengths is not None:
        _check_positions(model, lengths)
    with ExitStack() as stack:
        with _naming_attn(), preparing():  # a backend that is wrong for this model is a setting
            attention = stack.enter_context(packed_attention(model, args.attn))
        try:
            proof = verify_packing(model, attention=attention, lengths=lengths)
        except NonFiniteError as error:
            raise UserError(f"--model {args.model} cannot be examined: {error}") from error
        except (*UNREADABLE, ImportError) as error:  # stock's hybrid models refuse packed rows without their kernels
            remedy = "use --attn auto" if args.attn == "off" else "train with packing=False"
            raise UserError(f"packed rows do not run with --attn {args.attn}: {describe(error)}; {remedy}") from error
    reason = attention.choice.reason
    facts = _facts(model)
    print(_table(facts, proof, reason))
    if file is not None:
        leaks = [{"from": source, "to": target, "gradient": gradient} for source, target, gradient in proof.leaks]
        asked = {"model": args.model, "adapter": args.adapter, "requested": args.attn, "reason": reason}
        write_json(file, {**asked, **proof.to_dict(), "leaks": leaks, **facts, "versions": versions()})
    if proof.proven:
        return 0
    print(f"fastpack-trl verify: not proven: {proof}; remedy: {_remedy(args.attn)}", file=sys.stderr)
    return 1


@contextmanager
def _naming_attn() -> Iterator[None]:
    """Name the option of this command where a message names the field: ``packed_attention='flex'``."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"packed_attention='(\w+)'", r"--attn \1", str(error))) from error


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device: use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _load(args: Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    from fastpack_trl.recipe.make_trainer import check_model

    trust = {"trust_remote_code": args.trust_remote_code}
    with preparing():
        check_model(args.model, trust, "--model")
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, **trust)
    if not args.adapter:
        return model
    from peft import PeftModel

    with preparing():
        return PeftModel.from_pretrained(model, args.adapter)


def _check_positions(model: Any, lengths: Sequence[int]) -> None:
    from fastpack_trl.model.facts import text_model

    most = getattr(text_model(model).config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(lengths) > most:
        raise UserError(f"--lengths has a document of {max(lengths)} tokens, the model has {most} positions")


def _remedy(requested: str) -> str:
    if requested == "off":
        return "train with packed_attention='auto' (FastSFTTrainer's default), not with stock"
    return "set packing=False"


def _facts(model: Any) -> dict[str, Any]:
    from fastpack_trl.model.facts import text_model

    parameters = list(model.parameters())
    config = text_model(model).config.get_text_config()
    return {
        "model_type": str(config.model_type),
        "layers": getattr(config, "num_hidden_layers", None),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "device": str(parameters[0].device),
        "stock_attention": str(config._attn_implementation),
    }


def _table(facts: Mapping[str, Any], proof: PackingProof, reason: str) -> str:
    budget = "reported only below fp32" if proof.budget is None else f"budget {proof.budget:.1e}"
    rows = {
        "model": f"{facts['model_type']}, {facts['layers']} layers, {facts['parameters']:,} parameters, "
        f"{'/'.join(facts['dtypes'])} on {facts['device']}",
        "path": f"{proof.path} ({reason})",
        "documents": f"{' + '.join(map(str, proof.lengths))} tokens",
        "difference": f"{proof.difference:.1e} of hidden states, from documents one by one under stock "
        f"{facts['stock_attention']} ({budget})",
        "not exercised": ", ".join(f"{name} (no document is longer)" for name in proof.not_exercised) or _NO_WINDOW,
    }
    width = max(map(len, rows))
    out = [f"{name.ljust(width)}  {value}" for name, value in rows.items()]
    out += ["", *_leak_lines(proof), "", str(proof)]
    return "\n".join(out)


def _leak_lines(proof: PackingProof) -> list[str]:
    """Format the largest gradient of each document's hidden states with respect to each other document's embeddings."""
    count = len(proof.lengths)
    leaks = {(source, target): gradient for source, target, gradient in proof.leaks}
    if count > _LARGEST_MATRIX:
        worst = sorted(leaks.items(), key=lambda item: -item[1])[:_LISTED_LEAKS]
        head = f"leaks: {len(leaks)} of {count * (count - 1)} pairs" + (", the largest:" if worst else "")
        return [head, *(f"  from document {source} to {target}: {size:.1e}" for (source, target), size in worst)]
    cells = [["", *(f"to {target}" for target in range(count))]]
    for source in range(count):
        sizes = [f"{leaks.get((source, target), 0.0):.1e}".replace("0.0e+00", "0") for target in range(count)]
        sizes[source] = "-"
        cells.append([f"from {source}", *sizes])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [
        "leaks: largest gradient of a document's hidden states (to) at another's embeddings (from); 0 is exact",
        *lines,
    ]
