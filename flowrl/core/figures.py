"""Pictures of numbers that matplotlib draws, alike for alike numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.errors import SaveError, install


@contextmanager
def drawn(to: Any, size: tuple[float, float] = (6, 3.6), **options: Any) -> Iterator[Any]:
    """Yield a new figure, which is written at the end of the context.

    Args:
        to: path of a file, or a stream.
        size: width and height in inches.
        **options: of matplotlib's `savefig`.

    Raises:
        SaveError: matplotlib is not installed, or writes no such files.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SaveError(f"a picture needs matplotlib ({error}): {install('tune')}") from None
    known = Figure().canvas.get_supported_filetypes()
    kind = options.get("format", str(to).rpartition(".")[2])
    if kind not in known:
        raise SaveError(f"{to}: no picture is written as {kind}; take one of {', '.join(known)}")
    # With a fixed salt the same numbers give the same ids in an SVG.
    with mpl.rc_context({"svg.hashsalt": "flowrl"}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        # So does no date.
        figure.savefig(to, metadata={"Date": None} if kind == "svg" else None, **options)
