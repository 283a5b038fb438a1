"""Kernels, each beside its torch twin of the same signature: the twin is the reference and the CPU path."""
