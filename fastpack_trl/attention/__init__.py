"""Packed attention: the backends, the choice between them, the seam into transformers, and the packing check."""
