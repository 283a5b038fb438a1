"""Recurrent layers of hybrid models on packed rows: convolutions and scans that stop at the end of a document."""
