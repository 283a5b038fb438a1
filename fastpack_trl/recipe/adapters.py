"""Load adapters over resized embeddings, and untie embeddings and head before a merge changes one of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError

_UNTIED = "lm_head: untied from the embeddings (tie_word_embeddings=false): the adapter changes only one of them"


def resize_to_adapter(model: Any, folder: Path, tokenizer: Callable[[], Any]) -> str:
    """Resize the embeddings and head of a base to the vocabulary of its adapter; return a line about it, or "".

    An adapter that was saved without embeddings needs a row for each token that it trains and, as in PEFT's
    `AutoPeftModel`, for each token of the tokenizer in its folder.
    """
    rows, saved = model.get_input_embeddings().weight.shape[0], _saved_rows(model, folder)
    needed = saved
    if not saved:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        trained = about.get("trainable_token_indices") or ()
        indices = chain.from_iterable(trained.values()) if isinstance(trained, dict) else trained
        of_tokenizer = len(tokenizer()) if (folder / "tokenizer_config.json").is_file() else 0
        needed = max(rows, of_tokenizer, *(index + 1 for index in indices), 0)
    if needed == rows:
        return ""
    model.resize_token_embeddings(needed, mean_resizing=not saved)
    new = "" if saved else f"; rows from {rows} on are newly initialized, because the adapter was saved without them"
    return f"embeddings: {rows} rows -> {needed}, the number that the adapter was trained with{new}"


def _saved_rows(model: Any, folder: Path) -> int:
    """Return the number of rows of the embeddings or head that an adapter has saved; 0 if it has saved neither."""
    from peft import load_peft_weights

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = {f".{name.rpartition('.')[2]}." for name, module in model.named_modules() if module in ends}
    for key, tensor in load_peft_weights(str(folder), device="cpu").items():
        by_row = key.endswith(".weight") and not key.endswith("lora_A.weight")
        if any(name in key for name in names) and (by_row or key.endswith("embedding_A")):
            return int(tensor.shape[0 if by_row else 1])
    return 0


def with_adapter(model: Any, folder: str) -> Any:
    """Return an adapter over its base; None if it lacks weights of an adapter of this base, or has others."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    with warnings.catch_warnings():
        # The warning says how to untie by hand, which `merge_adapter` does.
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = PeftModel.from_pretrained(model, folder)
        except UserWarning:
            return None
    others = set_peft_model_state_dict(adapted, load_peft_weights(folder, device="cpu")).unexpected_keys
    return None if any("lora_" in name for name in others) else adapted  # an embedding may be saved twice


def merge_adapter(model: Any) -> tuple[Any, str]:
    """Merge an adapter into its base; return the model, and a line if its embeddings and head are no longer tied.

    Tied weights are one tensor: merging an adapter of one of them would change the other.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper
    from torch import equal, nn

    base = model.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    configs = [each for each in (base.config, base.config.get_text_config()) if getattr(each, "tie_word_embeddings", 0)]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if plain != ends and plain[1] is not None and plain[0].weight is plain[1].weight:
        plain[1].weight = nn.Parameter(plain[1].weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")  # reported below
        merged = model.merge_and_unload(safe_merge=True)
    embeddings, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):  # PEFT unwraps one of two wrappers (`check_runs`)
        head = head.modules_to_save[head.active_adapter]
        merged.set_output_embeddings(head)
    if head is None or not configs:
        return merged, ""
    tied = equal(embeddings.weight, head.weight)  # an adapter with `ensure_weight_tying` changes both alike
    if tied:
        head.weight = embeddings.weight
    for config in configs:
        config.tie_word_embeddings = tied
    return merged, "" if tied else _UNTIED


def check_runs(model: Any) -> None:
    """Raise `UserError` for an adapter that PEFT cannot run: a head in `modules_to_save` with trained tokens."""
    from peft.utils import ModulesToSaveWrapper

    # TRL asks for both if `chat_template_path` adds tokens to a model with tied weights.
    token_adapter = getattr(model.get_output_embeddings(), "token_adapter", None)
    if isinstance(getattr(token_adapter, "base_layer", None), ModulesToSaveWrapper):
        raise UserError("PEFT cannot combine a head in modules_to_save with trainable tokens: merge the adapter first")
