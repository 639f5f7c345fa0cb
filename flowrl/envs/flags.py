"""Checks of the flags `terminated` and `truncated`, as environments return them."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.errors import a

FLAGS = frozenset((bool, np.bool_))
"""The types that need no closer look."""
WANTED = "it must be True or False, as a comparison gives it"
"""The way out, for errors."""


def no_flag(value: Any) -> str:
    """Return how to call a value that is neither True nor False; empty for one that is.

    Numbers are flags too, in an array of one or by themselves. NaN is none, for it would count as
    True, as any text would; nor is None, which would count as False.

    >>> no_flag(0.0), no_flag(np.array([True]))
    ('', '')
    >>> no_flag(float("nan")), no_flag("no"), no_flag(None), no_flag([])
    ('nan', "'no'", 'None', 'a list')
    """
    if type(value) in FLAGS:
        return ""
    x = np.asarray(value)
    if x.size == 1 and are_flags(x):
        return ""
    return repr(value) if x.ndim == 0 and x.dtype.kind in "fUO" else a(value)


def not_flags(terminated: Any, truncated: Any) -> str:
    """Return what a step returned if its flags are none; empty if both are."""
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if wrong := no_flag(flag):
            return f"{wrong} as {name} from step; {WANTED}"
    return ""


def are_flags(values: Any) -> bool:
    """Return whether an array holds nothing but flags."""
    kind = values.dtype.kind
    return kind in "biu" or (kind == "f" and not np.isnan(values).any())
