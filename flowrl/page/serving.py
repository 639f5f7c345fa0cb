"""Serving the page of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.page.address import Address
from flowrl.page.saved import SavedRuns
from flowrl.page.server import Page

if TYPE_CHECKING:
    from flowrl.running import Run


def serve(run: Run, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> Page:
    """Serve the live page of a run: its graph, what each node does now, and what it learns.

    The page is read from the run about once a second while somebody looks at it, and goes on
    showing it after its end, until this process ends.

    Args:
        run: a run that goes on, or has ended.
        host: address to serve at (default this machine alone).
        port: port to serve at; 0: a free one (default 0).
        token: what lets browsers in, as often as it is given, at least 16 characters; None: that
            of the environment variable ``FLOWRL_UI_TOKEN`` or, on this machine alone, a new one
            that works once (default None).

    Returns:
        The page; its `link` opens it in a browser, and `close` ends it.

    Raises:
        SettingError: the port is in use, the host is none of this machine, or other machines reach
            it and there is no token.
    """
    page = Page(host, port, token)
    page.show(run)
    return page


def with_page(ui: bool | int | str, start: Callable[[], Run]) -> Run:
    """Start a run, serve its page, and print the link of the page to standard error.

    The page is there before the run is, for resources may take long to open.

    Args:
        ui: as `fl.run` takes it.
        start: starts the run.

    Raises:
        SettingError: the page can't be served there.
    """
    page = Page(*Address.given(ui))
    sys.stderr.write(f"live page: {page.printed}\n")
    try:
        run = start()
    except BaseException:
        page.close()
        raise
    page.show(run)
    run.page = page
    return run


def serve_saved(paths: Iterable[str | Path], *, host: str = "127.0.0.1", port: int = 0) -> Page:
    """Serve the page of saved runs, of which some may go on in other processes.

    Runs that are added to a directory, or removed from it, come and go in the list on the page.

    Args:
        paths: directories of runs, or directories that have such in them.
        host: address to serve at (default this machine alone).
        port: port to serve at; 0: a free one (default 0).

    Raises:
        SaveError: there is no run in a directory.
        SettingError: the page can't be served there, as of `serve`.
    """
    found = SavedRuns(paths)
    page = Page(host, port, look=found.look)
    found.look(page.runs)
    return page
