"""Serving the page of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.page.saved import SavedRuns
from flowrl.page.server import Page

if TYPE_CHECKING:
    from flowrl.running import Run


def serve(run: Run, *, host: str = "127.0.0.1", port: int = 0) -> Page:
    """Serve the live page of a run: its graph, what each node does now, and what it learns.

    The page is read from the run about once a second while somebody looks at it, and goes on
    showing it after its end, until this process ends.

    Args:
        run: a run that goes on, or has ended.
        host: address to serve at (default this machine alone).
        port: port to serve at; 0: a free one (default 0).

    Returns:
        The page; its `link` opens it in a browser, once, and `close` ends it.

    Raises:
        SettingError: the port is in use, or the host is none of this machine.
    """
    page = Page(host, port)
    page.show(run)
    return page


def serve_saved(paths: Iterable[str | Path], *, host: str = "127.0.0.1", port: int = 0) -> Page:
    """Serve the page of saved runs, of which some may go on in other processes.

    Runs that are added to a directory, or removed from it, come and go in the list on the page.

    Args:
        paths: directories of runs, or directories that have such in them.
        host: address to serve at (default this machine alone).
        port: port to serve at; 0: a free one (default 0).

    Raises:
        SaveError: there is no run in a directory.
        SettingError: the port is in use, or the host is none of this machine.
    """
    found = SavedRuns(paths)
    page = Page(host, port, found.look)
    found.look(page.runs)
    return page
