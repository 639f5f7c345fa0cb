"""Who may read a page: whoever opened its link, from a page of its own, at its own address."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse, Response

from flowrl.core.compile_cache import users_cache

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

COOKIE = "flowrl-page"
"""The beginning of the cookie's name. Its end is the port, for browsers keep no ports apart."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
USED = (
    "this link was used already, and works once; for several browsers choose a token of your own: "
    "set the environment variable FLOWRL_UI_TOKEN, and start again"
)
WAY = "open the link that flowrl printed; each works once, and the browser is known from then on"


class Guard:
    """ASGI middleware that refuses every request that the page itself would not make.

    Args:
        app: what answers the others.
        hosts: the names and ports by which the server is reached, such as ``127.0.0.1:8642``.
        token: what lets browsers in, as often as it is given; None for a new one, which lets one
            browser in, once.
        key: what the cookie is made of, so that a browser that was let in is known to a server
            that is started again at the same port; None for a new one.
    """

    def __init__(
        self, app: Any, hosts: tuple[str, ...], token: str | None = None, key: bytes | None = None
    ) -> None:
        self.app, self.hosts = app, hosts
        self.token = token or secrets.token_urlsafe(24)
        """What a link holds to let a browser in; empty once it was used, if it works once."""
        self.used = False
        """Whether the link was used, and lets nobody in any more."""
        self.once = token is None
        """Whether the token works once."""
        self.cookie = f"{COOKIE}-{hosts[0].rpartition(':')[2]}"
        """The name of the cookie."""
        # A token of the user's own is what the cookie stands for: with another one it is void.
        made_of, key = f"{self.cookie} {token or ''}", key or secrets.token_bytes(32)
        days = [datetime.now(UTC).date() - timedelta(days=back) for back in (0, 1)]
        # So a browser is known for as long as this server is there, and to one that is started
        # again until a day later: nobody who ever got its cookie has it for good.
        self._sessions = [
            hmac.new(key, f"{made_of} {day}".encode(), "sha256").hexdigest() for day in days
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        response = self._refusal(scope)
        if response is None:
            await self.app(scope, receive, self._with_headers(send))
            return
        # Whoever is refused keeps no connection, of which there are only so many.
        response.headers["connection"] = "close"
        await response(scope, receive, self._with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = _headers(scope)
        # A page of another site may reach this address by a name of its own.
        if headers.get("host") not in self.hosts:
            return PlainTextResponse("this host is not served here", 421)
        own = {f"http://{host}" for host in self.hosts}
        # A browser names the origin of whatever changes something.
        absent = "" if scope["method"] == "POST" else next(iter(own))
        if headers.get("origin", absent) not in own:
            return PlainTextResponse("pages of other sites may not ask", 403)
        # A link on another site leads here at most to the first page.
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and (scope["path"] != "/" or scope["method"] != "GET"):
            return PlainTextResponse("pages of other sites may not ask", 403)
        if scope["method"] not in ("GET", "POST"):
            return PlainTextResponse("only GET and POST are served", 405)
        if self._knows(headers.get("cookie", "")):
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and scope["method"] == "GET" and self._lets_in(given):
            response = RedirectResponse("/", 303)
            response.set_cookie(self.cookie, self._sessions[0], httponly=True, samesite="strict")
            return response
        return PlainTextResponse(USED if self.used and given else f"no token: {WAY}", 401)

    def _knows(self, text: str) -> bool:
        cookie: SimpleCookie = SimpleCookie()
        try:
            cookie.load(text)
        except CookieError:
            return False
        found = cookie.get(self.cookie)
        return found is not None and any(
            hmac.compare_digest(found.value.encode(), known.encode()) for known in self._sessions
        )

    def _lets_in(self, given: str) -> bool:
        """Return whether a token is the one of the link."""
        if not self.token or not hmac.compare_digest(given.encode(), self.token.encode()):
            return False
        if self.once:
            self.token, self.used = "", True
        return True

    def _with_headers(self, send: Send) -> Send:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        return with_headers


def users_key() -> bytes | None:
    """Return the key of this user's pages, made at the first call; None where none can be kept."""
    file = users_cache() / "page.key"
    with suppress(OSError):
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                # Nobody else may read it, not even for a moment.
                made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(made, "wb") as opened:
                    opened.write(secrets.token_bytes(32))
        key = file.read_bytes()
        return key if len(key) == 32 else None
    return None


def _headers(scope: Scope) -> dict[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
