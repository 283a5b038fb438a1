"""Counters, timers, and the records and tables of measurements."""
