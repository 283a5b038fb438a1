"""Counters, and the records and tables of measurements."""
