"""Fused layers: which norms, rotations and gates of a model are found, proven equal to a kernel, and replaced."""
