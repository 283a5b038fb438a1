"""``fastpack-trl verify``: load a model and check that it keeps packed documents apart."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from fastpack_trl.errors import NonFiniteError, UserError, check_name, describe, preparing, short_repr
from fastpack_trl.measure.record import versions
from fastpack_trl.recipe.make_trainer import check_model
from fastpack_trl.recipe.paths import model_folder, titled
from fastpack_trl.recipe.yaml import load_config


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl verify``; imports nothing heavy."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="folder of a causal language model, or its hub name")
    add("--config", metavar="FILE", help="the YAML of a run, in place of --model: its model is checked")
    add("--adapter", metavar="DIR", help="folder of a PEFT adapter for it, or its hub name")
    attn_help = "auto (the trainer's choice), a backend such as per_document or sdpa, or off: TRL's implementation"
    add("--attn", metavar="NAME", default="auto", help=attn_help)
    dtype_help = "of the weights; float32, the default, is the sharpest comparison and takes 4 bytes per parameter; "
    dtypes = ("float32", "bfloat16", "float16", "auto")
    add("--dtype", choices=dtypes, default="float32", help=dtype_help + "auto is the checkpoint's")
    add("--trust_remote_code", action="store_true", help="run code that comes with the checkpoint (default: never)")


def run(args: Namespace, record: dict[str, Any]) -> int:
    """Load, check, print; return 0 if packed results are those of separate documents, else 1, the fix on stderr."""
    args.model = args.model or (load_config(args.config).get("model_name_or_path") if args.config else None)
    if not args.model:
        raise UserError("no model: give --model a folder or a hub name, or --config the YAML of a run")
    args.model = model_folder("--model", args.model)
    if args.adapter:
        args.adapter = model_folder("--adapter", args.adapter, "adapter_config.json")
    # Imported from here on: torch and transformers take seconds.
    from fastpack_trl.attention.backends import BACKENDS
    from fastpack_trl.attention.install import packed_attention
    from fastpack_trl.attention.proof import verify_packing
    from fastpack_trl.model.facts import UNREADABLE, text_model

    check_name("--attn", args.attn, ("auto", *BACKENDS, "off"), "names")
    model = _load(args)
    config = text_model(model).config.get_text_config()
    with preparing(), packed_attention(model, args.attn) as attention:  # a backend may not fit the model
        try:
            proof = verify_packing(model, attention=attention)
        except NonFiniteError as error:
            raise UserError(f"--model {args.model} cannot be examined: {error}") from error
        except (*UNREADABLE, ImportError) as error:  # TRL's hybrid models refuse packed rows without their kernels
            fix = "use --attn auto" if args.attn == "off" else "train with packing=False"
            raise UserError(f"packed rows do not run with --attn {args.attn}: {describe(error)}; {fix}") from error
    reason, parameters = attention.choice.reason, list(model.parameters())
    dtypes = "/".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
    rows = {
        "model": f"{config.model_type}, {sum(parameter.numel() for parameter in parameters):,} parameters, {dtypes} on "
        f"{parameters[0].device}",
        "path": f"{proof.path} ({reason})",
        "documents": f"{' + '.join(map(str, proof.lengths))} tokens",
    }
    leaks = [f"  from document {source} to {target}: gradient {size:.1e}" for source, target, size in proof.leaks]
    print("\n".join([*titled(rows), *leaks, str(proof)]))
    record |= {"model": args.model, "adapter": args.adapter, "requested": args.attn, "reason": reason}
    every = [dict(zip(("from", "to", "gradient"), leak, strict=True)) for leak in proof.leaks]
    record |= {**proof.to_dict(), "leaks": every, "versions": versions()}
    if proof.proven:
        return 0
    fix = "train with packed_attention='auto', the default" if args.attn == "off" else "set packing=False"
    print(f"fastpack-trl verify: failed: {proof}; fix: {fix}", file=sys.stderr)
    return 1


def _load(args: Namespace) -> Any:
    import torch
    import transformers

    from fastpack_trl.model.preflight import check_weights

    trust = {"trust_remote_code": args.trust_remote_code}
    with preparing():
        check_model(args.model, trust, "--model")
        check_weights(args.model, "--model")
    with preparing(what=" with --adapter ".join(map(short_repr, filter(None, (args.model, args.adapter))))):
        config = transformers.AutoConfig.from_pretrained(args.model, **trust)
        is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
        auto = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
        model: Any = auto.from_pretrained(args.model, dtype=args.dtype, **trust)
        if args.adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, args.adapter)
    # A quantized model stays where its kernels are.
    on_gpu = next(model.parameters()).is_cuda
    return model if on_gpu or not torch.cuda.is_available() else model.to("cuda")
