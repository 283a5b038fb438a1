"""Names that have moved to `benchmarks.command`."""

from benchmarks.command import in_one_line, record_of

__all__ = ["in_one_line", "record_of"]
