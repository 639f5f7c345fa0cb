"""Pictures of numbers that matplotlib draws, alike for alike numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.errors import SaveError, install


@contextmanager
def axes_of(to: Any, **options: Any) -> Iterator[Any]:
    """Yield the axes of a new figure, which is written at the end of the context.

    Args:
        to: path of a file, or a stream.
        **options: of matplotlib's `savefig`.

    Raises:
        SaveError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SaveError(f"a picture needs matplotlib ({error}): {install('jax-envs')}") from None
    # With a fixed salt the same numbers give the same ids in an SVG.
    with mpl.rc_context({"svg.hashsalt": "flowrl"}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        yield figure.subplots()
        figure.savefig(to, **options)
