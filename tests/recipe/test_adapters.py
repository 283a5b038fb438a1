"""Adapters over embeddings that were resized or are tied: merged, they compute what they did before, and they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from sft_material import SENTENCES, TEMPLATE, Material, make_tokenizer, save_model, write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastpack_trl.cli.main import main
from fastpack_trl.testing import tiny_model

ROWS = 304
GEMMA4 = dict(  # noqa: C408
    vocab_size=ROWS, vocab_size_per_layer_input=ROWS, hidden_size=32, hidden_size_per_layer_input=8,
    intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    global_head_dim=16, sliding_window=5, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
ALL = {"target_modules": "all-linear"}
EMBEDDINGS = {"target_modules": ["q_proj", "embed_tokens"]}
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
UNTIED, RESIZED = "lm_head: a weight of its own (tie_word_embeddings=false)", "embeddings: 304 rows -> 320"


def composite(family: str, **text: Any) -> Any:
    """A text model with a vision tower, which has no weights of note here."""
    config = AutoConfig.for_model(family)
    vision = {"hidden_size": 16, "depth": 1, "num_hidden_layers": 1, "num_heads": 2, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "out_hidden_size": 32}
    for part, values in ((config.text_config, text), (config.vision_config, vision)):
        for name, value in values.items():
            if hasattr(part, name):
                setattr(part, name, value)
    if hasattr(config, "audio_config"):
        config.audio_config = None
    name = next(name for name in dir(transformers) if name == f"{NAMES[family]}ForConditionalGeneration")
    return getattr(transformers, name)(config)


NAMES = {"gemma4": "Gemma4", "qwen3_5": "Qwen3_5"}


def base_of(kind: str) -> Any:
    """A model with weights that differ from token to token, and from layer to layer."""
    family, _, more = kind.partition(" ")
    if family == "qwen3":
        return tiny_model("qwen3", hidden_size=32, head_dim=16, vocab_size=ROWS, tie_word_embeddings=more == "tied")
    torch.manual_seed(0)
    if family == "gemma4":
        return composite(family, **GEMMA4, num_kv_shared_layers=int(more))
    if family == "gemma4_text":
        config = AutoConfig.for_model(family, **GEMMA4, num_kv_shared_layers=int(more))
        return AutoModelForCausalLM.from_config(config)
    text = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    return composite(family, **text)


def logits(model: Any, rows: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([[5, 9, 33, 120, 7, 60, rows - 1]])).logits.float()
    return found


def save_adapter(folder: Path, kind: str, rows: int, more: dict[str, Any], **saving: Any) -> tuple[Path, Any]:
    """An adapter as a script leaves it, over a base in a folder of its own; and its logits."""
    base_of(kind).save_pretrained(folder / "base")
    make_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder / "base")
    plain = AutoConfig.from_pretrained(folder / "base")
    base = getattr(transformers, plain.architectures[0]).from_pretrained(folder / "base")
    base.resize_token_embeddings(rows)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter", **saving)
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([f"<new{number}>" for number in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter", logits(model, rows)


@pytest.mark.parametrize(
    ("kind", "rows", "more", "says"),
    [
        ("qwen3 tied", 320, ALL, (RESIZED,)),
        ("qwen3", 320, ALL, (RESIZED,)),
        ("qwen3 tied", 320, ALL | BOTH, (RESIZED, UNTIED)),
        ("qwen3", 320, ALL | BOTH, (RESIZED,)),
        ("qwen3 tied", 302, ALL, ("embeddings: 304 rows -> 302",)),
        ("qwen3 tied", 320, EMBEDDINGS, (RESIZED, UNTIED)),
        ("qwen3 tied", 320, ALL | {"trainable_token_indices": [5, 310]}, (RESIZED,)),
        ("qwen3 tied", ROWS, EMBEDDINGS, (UNTIED,)),
        ("qwen3 tied", ROWS, {"target_modules": ["q_proj", "lm_head"]}, (UNTIED,)),
        ("qwen3 tied", ROWS, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, (UNTIED,)),
        ("qwen3 tied", ROWS, {"modules_to_save": ["embed_tokens"]}, (UNTIED,)),
        ("qwen3 tied", ROWS, EMBEDDINGS | {"ensure_weight_tying": True}, ()),
        ("qwen3", ROWS, EMBEDDINGS, ()),
        ("gemma4_text 0", ROWS, ALL, ()),
        ("gemma4_text 2", ROWS, ALL, ()),
        ("gemma4_text 2", ROWS, EMBEDDINGS, (UNTIED,)),
        ("gemma4 0", ROWS, ALL, ()),
        ("gemma4 2", 320, EMBEDDINGS, (RESIZED, UNTIED)),
        ("qwen3_5", ROWS, ALL, ()),
    ],
)
def test_merged_model_computes_what_the_adapter_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, rows: int, more: dict[str, Any], says: tuple[str, ...]
) -> None:
    adapter, expected = save_adapter(tmp_path, kind, rows, more)
    assert main(["merge", str(adapter)]) == 0
    said = capsys.readouterr().out
    assert [line for line in (RESIZED[:11], UNTIED[:8]) if line in said] == [line.partition(" ")[0] for line in says]
    assert all(line in said for line in says), said
    merged = Path(f"{adapter}-merged")
    config = AutoConfig.from_pretrained(merged)
    model = getattr(transformers, config.architectures[0]).from_pretrained(merged)
    torch.testing.assert_close(logits(model, rows), expected, rtol=1e-4, atol=1e-4)
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == config.tie_word_embeddings == (UNTIED not in says and kind != "qwen3")
    assert len(AutoTokenizer.from_pretrained(merged)) <= model.get_input_embeddings().weight.shape[0]
    assert main(["generate", str(adapter), "--prompt", "the quick", "--max_new_tokens", "2"]) == 0
