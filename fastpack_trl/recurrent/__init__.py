"""Recurrent layers of hybrid models on packed rows: convolution and scans that stop where a document ends."""
