"""Uses of a tiny Gemma 4 whose last layers share keys, each beside stock: ``python gemma4_uses.py KIND SHARED LAST``.

A process of its own: where attention reads past its tensors, the process ends without a word. Prints the name of each
use once it has passed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import preference_material as preference
import torch
from peft import LoraConfig
from trainer_material import assert_same_log, both, build, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4Config, Gemma4ForConditionalGeneration

from fastpack_trl import FastSFTTrainer, PackedBatch, packed_attention, verify_packing
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.cli.main import main as cli
from fastpack_trl.errors import PackingError
from fastpack_trl.testing import tiny_model

IMAGE = 95
STEPS = {"max_steps": 2, "eval_strategy": "no", "learning_rate": 1e-5}  # Adam's first steps turn rounding into signs
LAYERS = {
    "full": ["sliding_attention", "full_attention"] * 2,
    "sliding": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    # Three of five layers share, of both types.
    "three": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


def gemma4(kind: str, shared: int, last: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of the class for text or of the composite one; `last`: of `LAYERS`."""
    text = {
        "vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 32, "hidden_size_per_layer_input": 8,
        "intermediate_size": 48, "num_hidden_layers": len(LAYERS[last]), "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
        "max_position_embeddings": 256, "num_kv_shared_layers": shared, "layer_types": LAYERS[last],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "text":
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **text)).to(dtype)
    ids = dict(zip(("image_token_id", "video_token_id", "audio_token_id"), (IMAGE, IMAGE - 1, IMAGE - 2), strict=True))
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None, **ids)
    return Gemma4ForConditionalGeneration(config).to(dtype)


def refuse_cut_rows(device: str, model: Any) -> list[str]:
    """Every backend that a device has refuses rows that are cut inside of a model; returns their names.

    `model` cuts the queries of its layers with shared keys, as transformers' versions do it; another, queries and keys.
    """

    def cut(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["hidden_states"] = kwargs["hidden_states"][:, -6:]
        kwargs["position_embeddings"] = tuple(part[:, -6:] for part in kwargs["position_embeddings"])
        return args, kwargs

    other = tiny_model("qwen3")
    other.model.layers[1].self_attn.register_forward_pre_hook(cut, with_kwargs=True)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1)).to(device)
    batch, ran = PackedBatch.from_lengths((9, 1, 14, 6)).to(device), []
    row = {"input_ids": ids, "packed_batch": batch, "position_ids": batch.position_ids, "use_cache": False}
    for each, fields in ((model, {"logits_to_keep": 4}), (other, {})):
        each = each.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
        for name in BACKENDS:
            said = ""
            try:
                with packed_attention(each, name):
                    found = each(**row, **fields).logits
                    whole = each(**row).logits[:, -4:] if each is model else None
            except (ValueError, PackingError) as error:
                said = str(error)
            if "cannot be used here" in said:
                continue
            if each is model and not said:  # this transformers cuts nothing there
                torch.testing.assert_close(found, whole)
            else:
                text = "4 queries over 30 keys" if each is model else "6 queries over 6 keys and 6 values"
                assert text in said, (name, said)
                assert "end at 30" in said
            ran.append(name)
    return ran


def uses(kind: str, shared: int, last: str, folder: Path) -> dict[str, Callable[[], None]]:
    """What a user does with such a model; each raises where it is not what stock does."""

    def sft(name: str, **options: Any) -> None:
        options |= STEPS
        ours, stock = both(folder / name, model=gemma4(kind, shared, last), **options)
        assert ours.fastpack_report["packed_attention"].path == "per_document"
        assert "proven" in ours.fastpack_report["verify_packing"].reason
        for run in (ours, stock):
            run.evaluate()
        assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)

    def prove(**options: Any) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            model = gemma4(kind, shared, last, dtype)
            for path in ("auto", "sdpa", "off"):
                proof = verify_packing(model, implementation=path, **options).raise_if_failed()
                assert not proof.not_exercised

    def preferences(name: str, **options: Any) -> None:
        options |= STEPS
        lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj"])}
        runs = []
        for fast in (True, False):
            model = gemma4(kind, shared, last)
            run = preference.build(name, folder / name / str(fast), fast=fast, model=model, trainer=lora, **options)
            run.train()
            runs.append(run)
        assert runs[0].fastpack_report["packed_attention"].path == "per_document"
        preference.assert_same(*runs, rtol=2e-5, atol=1e-5)

    def command() -> None:
        gemma4(kind, shared, last).save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        assert cli(["verify", "--model", str(folder / "model"), "--device", "cpu"]) == 0

    def off() -> None:
        run = build(
            FastSFTTrainer, folder / "off", model=gemma4(kind, shared, last), fast={"packed_attention": "off"},
            packing=True, **STEPS,
        )  # fmt: skip
        run.train()
        assert run.fastpack_report["verify_packing"].path == "proof of stock"

    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj"])}
    return {
        "proof": prove,
        "past_window": lambda: prove(lengths=(9, 40, 6)),
        "cut": lambda: refuse_cut_rows("cpu", gemma4(kind, shared, last)),
        "packed": lambda: sft("packed", packing=True),
        "padded": lambda: sft("padded"),
        "lora": lambda: sft("lora", packing=True, trainer=lora),
        "off": off,
        "dpo": lambda: preferences("DPO"),
        "grpo": lambda: preferences("GRPO"),
        "verify": command,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asked = uses(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(place))
        for use in sys.argv[4:] or asked:
            asked[use]()
            print(f"passed: {use}", flush=True)
