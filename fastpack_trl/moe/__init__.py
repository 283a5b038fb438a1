"""Mixture-of-experts layers: tokens sorted once per layer and step, one autograd function per experts block."""
