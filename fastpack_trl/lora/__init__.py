"""Dense LoRA projections without glue (those of expert stacks are in `moe`)."""
