"""Dense LoRA projections with few kernels (LoRA on expert stacks is in `moe`)."""
