"""How often Python searches for cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 100_000
"""The objects that are made between two searches while functions are traced."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Search for cyclic garbage rarely meanwhile.

    Tracing makes very many objects that live on. To search them for cycles as often as Python does
    by itself takes a seventh of the time until a run's first row.
    """
    before = gc.get_threshold()
    # A threshold of 0 means that the user switched the search off.
    gc.set_threshold(before[0] and max(before[0], RARELY), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
