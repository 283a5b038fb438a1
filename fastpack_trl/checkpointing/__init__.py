"""Activation memory: layer inputs kept in host memory (`seam`), and the level of every layer (`plan`)."""
