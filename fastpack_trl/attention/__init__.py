"""Packed attention: what a model needs, the backends, the choice between them, and the seam into transformers."""
