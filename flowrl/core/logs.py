"""What flowrl logs goes to the logger ``flowrl``, and each line names flowrl once."""

from __future__ import annotations

import logging


def log(text: str, level: int = logging.WARNING) -> None:
    """Log a text, as a warning or at another level.

    Where nobody set `logging` up, it prints a warning as it is to standard error, so the text gets
    the name of flowrl. A handler, such as that of `logging.basicConfig`, names the logger itself.

    Args:
        text: what to log.
        level: a level of `logging` (default ``logging.WARNING``).
    """
    logger = logging.getLogger("flowrl")
    logger.log(level, "%s%s", "" if logger.hasHandlers() else "flowrl: ", text)
