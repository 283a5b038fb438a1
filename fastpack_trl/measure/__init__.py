"""Counters, clocks, timed rounds, and the records and tables of what they find."""
