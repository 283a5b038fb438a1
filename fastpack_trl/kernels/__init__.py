"""Kernels, each beside its torch twin of the same signature: the twin is the reference and the CPU path.

Triton's are imported only where one runs: Triton decides on import whether it compiles or interprets.
"""
