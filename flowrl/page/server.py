"""The server of the page: on this machine only, unless a host is named."""

from __future__ import annotations

import asyncio
import atexit
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowrl.core.events import Started
from flowrl.errors import FlowrlError, SettingError
from flowrl.observe.history import History
from flowrl.page.address import Address, checked_token
from flowrl.page.export import as_one_file
from flowrl.page.guard import Guard, users_key
from flowrl.page.routes import Look, Runs, routes
from flowrl.page.source import Cursor, LiveRun, Source

if TYPE_CHECKING:
    from flowrl.running import Run

STREAMS = 16
"""The most pages that look at the same time."""
CONNECTIONS = 128
"""The most connections, whether they ask for anything or not."""
PATIENCE = 10.0
"""The seconds in which a new connection must ask for something."""
LAST_WORDS = 2.0
"""The most seconds for which a page that is closed waits for those who look."""
LONGEST = 16_384
"""The most bytes of a request's headers."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
"""The types of the files of the page, by the ends of their names."""


class Page:
    """A page that is served until this process ends, or `close` is called.

    Args:
        host: the address to serve at (default this machine alone).
        port: the port; 0 for a free one (default 0).
        token: what lets browsers in, as often as it is given; None for that of the environment
            variable ``FLOWRL_UI_TOKEN`` or, on this machine alone, for a new one that works once
            (default None).
        look: brings the runs up to date, and is called with them before they are listed; None for
            those that `show` adds (the default).

    Raises:
        SettingError: the port is in use, the host is none of this machine, or other machines reach
            it and there is no token.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        look: Look | None = None,
    ) -> None:
        address = Address(host, port)
        token = checked_token(token, address)
        self.runs: Runs = {}
        """What it shows, by the id under which it finds each."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            # What connects before the thread is at work waits for it.
            self._socket.listen()
        except (OSError, OverflowError) as error:
            self._socket.close()
            why = getattr(error, "strerror", None) or "ports are from 0 to 65,535"
            raise SettingError(
                f"can't serve a page at {host}:{port}: {why}; name another port, or 0 for a free "
                "one"
            ) from None
        self.host, self.port = host, self._socket.getsockname()[1]
        hosts = tuple(f"{name}:{self.port}" for name in address.names())
        self._streams = Streams()
        app = application(self.runs, self._streams, look)
        self.guard = Guard(app, hosts, token, users_key())
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
        # A script that ends with its run would else take the server away before the end is seen.
        atexit.register(self.close)

    @property
    def link(self) -> str:
        """The link that lets a browser in; the address alone once it was used, if it works once."""
        token = f"?token={quote(self.guard.token)}" if self.guard.token else ""
        return f"http://{self.guard.hosts[0]}/{token}"

    @property
    def printed(self) -> str:
        """The link as it may be printed, which is without a token of the user's own."""
        token = self.guard.token
        return self.link if self.guard.once else self.link.replace(quote(token), "...")

    def show(self, run: Run) -> None:
        """Show a run, which goes on or has ended."""
        history = run.history or History()
        if run.history is None and run.reason is None:
            history.open(run.profile)
            run.observe(history)
        source = LiveRun(
            run.plan,
            lambda: run.rows,
            run.profile,
            run.controls,
            observe=run.observe,
            history=history,
            goal=run.goal,
            started=run.started,
        )
        if run.history is None:
            # Without a directory there is no place for a snapshot.
            source.verbs = tuple(verb for verb in source.verbs if verb != "snapshot")
        source(Started(run.plan, run.profile), run.started)
        if run.reason is None:
            run.observe(source)
        else:
            source.state = run.reason
        self.runs["run"] = source

    def _repr_html_(self) -> str:
        # A notebook shows this: the page as it is now, which needs no server. Another site, such as
        # the notebook's, can't show the live page within its own.
        if not self.runs:
            return f"<p>live page: {escape(self.printed)}</p>"
        source = next(iter(self.runs.values()))
        text = escape(as_one_file(source, source.summary()["name"]))
        style = "width:100%;height:800px;border:1px solid #8884;border-radius:6px"
        frame = f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{text}"></iframe>'
        return f"<p>as it is now; live: {escape(self.printed)}</p>{frame}"

    def close(self) -> None:
        """Serve no more, once those who look were sent the end of what they look at."""
        atexit.unregister(self.close)
        self._streams.ending.set()
        ends = time.monotonic() + LAST_WORDS
        while self._streams.open and time.monotonic() < ends:
            time.sleep(0.02)
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


class Streams:
    """The streams that pages read."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(STREAMS)
        """How many more there may be."""
        self.open = 0
        """How many there are."""
        self.ending = threading.Event()
        """Whether each is to end, once it has sent what is new."""


def application(runs: Runs, streams: Streams, look: Look | None = None) -> Starlette:
    """Return what answers requests that are allowed; runs are found by id, never by a path.

    Args:
        runs: the runs by their ids.
        streams: the streams that pages read.
        look: brings them up to date before they are listed; None: they are (the default).
    """
    static = {
        entry.name: entry.read_bytes() for entry in files(__package__).joinpath("static").iterdir()
    }

    def asset(name: str) -> Response:
        if name not in static:
            return PlainTextResponse("there is no such file", 404)
        return Response(static[name], media_type=KINDS[name.rpartition(".")[2]])

    async def index(_: Request) -> Response:
        return asset("index.html")

    async def file(request: Request) -> Response:
        return asset(request.path_params["name"])

    async def stream(request: Request) -> Response:
        source = runs.get(request.path_params["run"])
        if source is None:
            return PlainTextResponse("there is no such run", 404)
        if streams.free.locked():
            return PlainTextResponse(f"{STREAMS} pages look already; close one", 503)
        return StreamingResponse(_news(source, streams), media_type="text/event-stream")

    app = Starlette(
        routes=[
            Route("/", index),
            Route("/static/{name}", file),
            Route("/runs/{run}/stream", stream),
            *routes(runs, look),
        ]
    )
    # A path that is not served is not found, whatever is like it.
    app.router.redirect_slashes = False
    return app


async def _news(source: Source, streams: Streams) -> AsyncIterator[str]:
    """Yield what is new, time and again. A slow reader only makes this wait, and not the run."""
    cursor, ends = Cursor(), False
    async with streams.free:
        streams.open += 1
        try:
            while True:
                try:
                    cursor, found = await run_in_threadpool(source.since, cursor)
                except (FlowrlError, OSError) as error:
                    found = {"error": str(error)}
                yield f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
                if ends:
                    return
                due, seen = time.monotonic() + source.every, cursor.events
                while not (ends := streams.ending.is_set()) and time.monotonic() < due:
                    await asyncio.sleep(min(source.every, 0.1))
                    # What happens, such as a restart, is shown at once.
                    if source.number > seen:
                        break
        finally:
            streams.open -= 1
