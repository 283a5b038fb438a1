"""LoRA projections without glue: dense layers and expert stacks."""
