"""A tokenizer trained on the spot and a randomly initialised model of a few million parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

VOCABULARY = 4_096
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML. The generation markers enclose the answer *and* its end-of-turn token, so that under `assistant_only_loss`
# the model also learns to stop (TRL warns otherwise).
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], *, vocabulary: int = VOCABULARY, progress: bool = True) -> Any:
    """Return a `PreTrainedTokenizerFast`, byte-level BPE with a chat template, that can encode every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN_START, TURN_END],
        # All 256 bytes, also those the corpus lacks: every text can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress and sys.stderr.isatty(),  # elsewhere it writes empty lines
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        # "\n ." in a docstring is text; nothing may be tidied away when decoding.
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: Any, *, seed: int, max_length: int) -> Any:
    """Return a `Qwen3ForCausalLM` of 4 layers with random weights, for rows of up to `max_length` tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    set_seed(seed)
    return Qwen3ForCausalLM(config)
