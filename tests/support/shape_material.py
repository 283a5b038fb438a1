"""A YAML for a model of which there is a config and nothing else, as `doctor --gpu` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models import shape_of
from fastpack_trl.recipe.make_trainer import short_run_arguments


def arguments_of(folder: Path, shape: str, layers: int | None = None, **settings: Any) -> Any:
    """Return the arguments of a LoRA run of a model of public shape."""
    of = shape_of(shape).cut_to(layers or int(shape_of(shape).fields["num_hidden_layers"]))
    return arguments_for(folder / shape, AutoConfig.for_model(of.model_type, **of.fields), **settings)


def arguments_for(folder: Path, config: Any, **settings: Any) -> Any:
    """Return the arguments of a LoRA run of the model of a config, which is written into `folder`."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    given = {  # the adapters of the records have no dropout
        "model_name_or_path": str(folder), "dataset_name": "unused", "dtype": "bfloat16", "packing": True,
        "use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "max_length": 2048, "per_device_train_batch_size": 1,
        **settings,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(given))
    return short_run_arguments(str(folder / "run.yaml"), str(folder / "out"), "--use_cpu", "True")
