"""Losses that stand out from those before them."""

from __future__ import annotations

import statistics
from collections.abc import Collection

RECENT = 200
"""A loss is compared with at most this many of the losses before it."""
ENOUGH = 20
"""A loss is compared once there are this many losses before it."""
FAR_OFF = 10.0
"""An outlier is further from the median than this many times the median distance from it."""


def outlier(loss: float, recent: Collection[float]) -> str:
    """Return why a loss stands out from those before it; an empty string if it does not.

    Where large losses are common, only one that is further off than all of them stands out.

    Args:
        loss: of the update.
        recent: the losses of updates before it, at least one.
    """
    middle = statistics.median(recent)
    distances = [abs(x - middle) for x in recent]
    spread, distance = statistics.median(distances), abs(loss - middle)
    # Losses that are all equal have a spread of 0, from which any rounding would stand out.
    if distance <= max(*distances, FAR_OFF * max(spread, 1e-6 * abs(middle))):
        return ""
    return (
        f"outlier: the loss is {loss:.4g}, the median before it {middle:.4g}, "
        f"the median distance from that {spread:.2g}"
    )
