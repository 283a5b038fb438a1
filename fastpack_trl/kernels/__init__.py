"""Kernels and their torch twins, with the same signatures: a twin is the reference and the CPU path.

Triton kernels are imported when one runs, because Triton decides on import whether it compiles or interprets.
"""
