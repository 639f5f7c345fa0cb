"""What a page asks of runs, beside the stream of what is new of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from flowrl.errors import FlowrlError
from flowrl.observe.diff import differences
from flowrl.page.past import past_moment, past_of
from flowrl.page.source import Cursor, Source

Runs = MutableMapping[str, Source]
"""The runs of a page by their ids."""
Look = Callable[[Runs], None]
"""What brings the runs of a page up to date before they are listed."""
Params = Mapping[str, str]
"""What stands in a path, by the names that the route gives it."""


def routes(runs: Runs, look: Look | None) -> list[Route]:
    """Return the routes by which a page asks of runs, which are found by id, never by a path.

    Args:
        runs: the runs by their ids.
        look: brings them up to date before they are listed; None: they are.
    """

    async def every(_: Request) -> Response:
        return JSONResponse(await run_in_threadpool(_listed, runs, look))

    def diff(source: Source, params: Params) -> Response:
        other = runs.get(params["other"])
        return missing("run") if other is None else JSONResponse(_differences(source, other))

    def of_run(
        path: str, answer: Callable[[Source, Params], Response], method: str = "GET"
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            source = runs.get(request.path_params["run"])
            if source is None:
                return missing("run")
            # Sources read files, and wait for locks.
            return await run_in_threadpool(answer, source, request.path_params)

        return Route(path, endpoint, methods=[method])

    return [
        Route("/runs", every),
        of_run("/runs/{run}", _facts),
        of_run("/runs/{run}/rows", _rows),
        of_run("/runs/{run}/items/{node}", _item),
        of_run("/runs/{run}/past", _past),
        of_run("/runs/{run}/past/{number}", _moment),
        of_run("/runs/{run}/diff/{other}", diff),
        of_run("/runs/{run}/{verb}", _control, "POST"),
        of_run("/runs/{run}/{verb}/{node}", _control, "POST"),
    ]


def missing(what: str) -> Response:
    """Return the answer to whoever asks for something that is not there."""
    return PlainTextResponse(f"there is no such {what}", 404)


def _facts(source: Source, _: Params) -> Response:
    return JSONResponse(source.facts())


def _rows(source: Source, _: Params) -> Response:
    return JSONResponse(source.since(Cursor())[1]["rows"])


def _item(source: Source, params: Params) -> Response:
    found = source.item(params["node"])
    if found is None:
        return missing("node")
    return JSONResponse(found) if found else Response(status_code=204)


def _past(source: Source, _: Params) -> Response:
    return JSONResponse(past_of(source.entries()))


def _moment(source: Source, params: Params) -> Response:
    # Only plain digits, and no more than an index has.
    is_index = re.fullmatch("[0-9]{1,9}", params["number"])
    number = int(params["number"]) if is_index else -1
    found = past_moment(source.entries(), number, source.row)
    return missing("moment") if found is None else JSONResponse(found)


def _control(source: Source, params: Params) -> Response:
    if not source.control(params["verb"], params.get("node", "")):
        return PlainTextResponse("this can't be done", 404)
    return PlainTextResponse("done")


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
