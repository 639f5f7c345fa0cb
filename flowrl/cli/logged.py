"""What flowrl logs while a command runs comes on standard error, and nowhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _ToStandardError(logging.Handler):
    """Handler that prints each message to what standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        print(f"flowrl: {record.getMessage()}", file=sys.stderr)


@contextmanager
def logged() -> Iterator[None]:
    """Print what the logger ``flowrl`` gets, in place of all other handlers.

    Libraries such as Brax give the root logger a handler of their own when they are imported, which
    would put the name of the logger before each message once more.
    """
    logger, handler = logging.getLogger("flowrl"), _ToStandardError(logging.WARNING)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
