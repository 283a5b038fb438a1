"""Decoder layers compiled by torch, one graph per kind of layer."""
