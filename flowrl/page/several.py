"""What a page asks of several runs: their list, their rows, and how their graphs differ."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flowrl.errors import FlowrlError
from flowrl.observe.diff import differences
from flowrl.page.source import Cursor, Source

Runs = MutableMapping[str, Source]
"""The runs of a page by their ids."""
Look = Callable[[Runs], None]
"""What brings the runs of a page up to date before they are listed."""


def routes(runs: Runs, look: Look | None) -> list[Route]:
    """Return the routes by which a page lists and compares runs.

    Args:
        runs: the runs by their ids.
        look: brings them up to date; None: they are.
    """

    async def every(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(_listed, runs, look))

    async def rows(request: Request) -> Response:
        source = runs.get(request.path_params["run"])
        if source is None:
            return PlainTextResponse("there is no such run", 404)
        _, news = await run_in_threadpool(source.since, Cursor())
        return JSONResponse(news["rows"])

    async def diff(request: Request) -> Response:
        one, other = (runs.get(request.path_params[name]) for name in ("run", "other"))
        if one is None or other is None:
            return PlainTextResponse("there is no such run", 404)
        return JSONResponse(await run_in_threadpool(_differences, one, other))

    return [
        Route("/runs", every),
        Route("/runs/{run}/rows", rows),
        Route("/runs/{run}/diff/{other}", diff),
    ]


def _listed(runs: Runs, look: Look | None) -> list[dict[str, Any]]:
    """Return a line about each run, with its id."""
    if look is not None:
        look(runs)
    found = []
    for name, source in list(runs.items()):
        # A directory may be removed while it is looked at.
        with suppress(OSError):
            found.append({"id": name, **source.summary()})
    return found


def _differences(one: Source, other: Source) -> dict[str, Any]:
    """Return what differs between the graphs of two runs, or why that is not known."""
    try:
        return differences(one.graph(), other.graph())
    except (FlowrlError, OSError) as error:
        return {"error": str(error)}
