"""The server of the page: on this machine only, unless a host is named."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.errors import SettingError
from flowrl.observe.history import History
from flowrl.page.guard import Guard
from flowrl.page.source import Cursor, LiveRun, Source

if TYPE_CHECKING:
    from flowrl.running import Run

SECONDS = 1.0
"""The seconds between two looks of a page at a run."""
STREAMS = 16
"""The most pages that look at the same time."""
CONNECTIONS = 128
"""The most connections, whether they ask for anything or not."""
PATIENCE = 10.0
"""The seconds in which a new connection must ask for something."""
LONGEST = 16_384
"""The most bytes of a request's headers."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
"""The types of the files of the page, by the ends of their names."""


class Page:
    """A page that is served until this process ends, or `close` is called.

    Args:
        host: the address to serve at (default this machine alone).
        port: the port; 0 for a free one (default 0).

    Raises:
        SettingError: the port is in use, or the host is none of this machine.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs: dict[str, Source] = {}
        """What it shows, by the id under which it finds each."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            # What connects before the thread is at work waits for it.
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise SettingError(
                f"can't serve a page at {host}:{port}: {error.strerror}; name another port, or 0 "
                "for a free one"
            ) from None
        self.host, self.port = host, self._socket.getsockname()[1]
        names = (host, "localhost") if host == "127.0.0.1" else (host,)
        hosts = tuple(f"{name}:{self.port}" for name in names)
        self.guard = Guard(application(self.runs), hosts)
        # With a `log_config` it would close the handlers of whoever logs in this process.
        config = uvicorn.Config(
            self.guard, log_config=None, log_level="critical", access_log=False, lifespan="off",
            ws="none", http=Limited, timeout_keep_alive=5, h11_max_incomplete_event_size=LONGEST,
            server_header=False, date_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="flowrl page", daemon=True
        )
        self._thread.start()

    @property
    def link(self) -> str:
        """The link that lets a browser in, once."""
        return f"http://{self.host}:{self.port}/?token={self.guard.token}"

    def show(self, run: Run) -> None:
        """Show a run, which goes on or has ended."""
        history = run.history or History()
        if run.history is None and run.reason is None:
            history.open(run.profile)
            run.observe(history)
        source = LiveRun(run.plan, lambda: run.rows, run.profile, run.controls, history)
        if run.reason is None:
            run.observe(source)
        else:
            source.state = run.reason
        self.runs["run"] = source

    def close(self) -> None:
        """Serve no more."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)


class Limited(H11Protocol):
    """The protocol of a connection, which ends if there are too many or it asks for nothing."""

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or end it."""
        if len(self.connections) >= CONNECTIONS:
            transport.abort()
            return
        super().connection_made(transport)
        self.loop.call_later(PATIENCE, self._end_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of a connection."""
        if self in self.connections:
            super().connection_lost(exc)

    def _end_if_idle(self) -> None:
        if self.cycle is None and self.transport is not None:
            self.transport.abort()


def application(runs: Mapping[str, Source]) -> Starlette:
    """Return what answers requests that are allowed; runs are found by id, never by a path."""
    static = {
        entry.name: entry.read_bytes() for entry in files(__package__).joinpath("static").iterdir()
    }
    looking = asyncio.Semaphore(STREAMS)

    def asset(name: str) -> Response:
        if name not in static:
            return PlainTextResponse("there is no such file", 404)
        return Response(static[name], media_type=KINDS[name.rpartition(".")[2]])

    async def index(_: Request) -> Response:
        return asset("index.html")

    async def file(request: Request) -> Response:
        return asset(request.path_params["name"])

    async def every(_: Request) -> Response:
        titles = [
            (run, *await run_in_threadpool(source.title)) for run, source in list(runs.items())
        ]
        return JSONResponse([{"id": x, "name": name, "state": state} for x, name, state in titles])

    async def control(request: Request) -> Response:
        source = runs.get(request.path_params["run"])
        if source is None or not source.control(request.path_params["verb"]):
            return PlainTextResponse("this can't be done", 404)
        return PlainTextResponse("done")

    async def stream(request: Request) -> Response:
        source = runs.get(request.path_params["run"])
        if source is None:
            return PlainTextResponse("there is no such run", 404)
        if looking.locked():
            return PlainTextResponse(f"{STREAMS} pages look already; close one", 503)
        return StreamingResponse(_news(source, looking), media_type="text/event-stream")

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/static/{name}", file),
            Route("/runs", every),
            Route("/runs/{run}", _answer(runs, lambda source, _: source.facts())),
            Route("/runs/{run}/stream", stream),
            Route("/runs/{run}/past", _answer(runs, lambda source, _: source.past())),
            Route("/runs/{run}/past/{number}", _answer(runs, _moment)),
            Route("/runs/{run}/{verb}", control, methods=["POST"]),
        ]
    )
    # A path that is not served is not found, whatever is like it.
    app.router.redirect_slashes = False
    return app


def _answer(
    runs: Mapping[str, Source], read: Callable[[Source, Mapping[str, str]], Any]
) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers with plain data of a run; what is None is not found.

    Args:
        runs: by id.
        read: reads the data of one of them; it gets the parts of the path, too.
    """

    async def answer(request: Request) -> Response:
        source = runs.get(request.path_params["run"])
        if source is None:
            return PlainTextResponse("there is no such run", 404)
        found = await run_in_threadpool(read, source, request.path_params)
        if found is None:
            return PlainTextResponse("there is no such moment", 404)
        return JSONResponse(found)

    return answer


def _moment(source: Source, parts: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what a run did at the moment that the path names."""
    number = parts["number"]
    # Python refuses to make a number of very many digits.
    if not (number.isascii() and number.isdecimal() and len(number) < 10):
        return None
    return source.past_moment(int(number))


async def _news(source: Source, looking: asyncio.Semaphore) -> AsyncIterator[str]:
    """Yield what is new, time and again. A slow reader only makes this wait, and not the run."""
    cursor = Cursor()
    async with looking:
        while True:
            cursor, found = await run_in_threadpool(source.since, cursor)
            yield f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
            await asyncio.sleep(SECONDS)
