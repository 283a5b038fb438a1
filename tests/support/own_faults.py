"""A feature that cannot read a model warns with the traceback, and TRL runs; in a test that is a fault of ours."""

from __future__ import annotations

import logging

FEATURES = logging.getLogger("fastpack_trl.features.feature")


class OwnFault(BaseException):
    """Ends a test. No `Exception`, so that neither the package nor an expectation of the test catches it."""


def raise_fault(record: logging.LogRecord) -> bool:
    """A filter of `FEATURES` that raises what a warning with a traceback is about."""
    if record.exc_info and record.exc_info[1]:
        raise OwnFault(record.getMessage()) from record.exc_info[1]
    return True
