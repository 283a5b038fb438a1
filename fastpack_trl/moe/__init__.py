"""Mixture-of-experts layers: tokens sorted once per layer and forward, one autograd function per experts block."""
