"""Packed batches: the data, the collator, the masks made from them."""
