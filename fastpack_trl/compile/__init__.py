"""Decoder layers compiled by torch, one graph per kind of layer (`layers`)."""

from fastpack_trl.compile.layers import CompiledLayers, compiled_layers

__all__ = ["CompiledLayers", "compiled_layers"]
