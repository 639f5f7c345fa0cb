"""Where a page is served: on this machine alone, unless another host and a token are given."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple

from flowrl.errors import SettingError

VARIABLE = "FLOWRL_UI_TOKEN"
"""The environment variable with the token of a page. A command line is no place for it, for other
users of the machine can read those."""
SHORTEST = 16
"""The fewest characters of a token."""
EVERYWHERE = "0.0.0.0"  # noqa: S104 - it is refused without a token


class Address(NamedTuple):
    """The host and the port at which a page is served."""

    host: str = "127.0.0.1"
    """Name or address; of this machine alone by default."""
    port: int = 0
    """The port; 0 for a free one."""

    @staticmethod
    def of(text: str) -> Address:
        """Read an address.

        Args:
            text: ``PORT`` or ``HOST:PORT``.

        Raises:
            SettingError: it is something else.
        """
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or int(port) > 65_535:
            raise SettingError(
                f"a page is served at PORT or HOST:PORT, such as 8642, with a port up to 65,535; "
                f"got {text!r}"
            )
        return Address(host or Address().host, int(port))

    @staticmethod
    def given(ui: Any) -> Address:
        """Return the address of the page that `fl.run` and `fl.debug` are asked for.

        Args:
            ui: True for a free port of this machine, a port, or ``HOST:PORT``.

        Raises:
            SettingError: it is something else.
        """
        if isinstance(ui, bool):
            return Address()
        if isinstance(ui, int | str):
            return Address.of(str(ui))
        raise SettingError(f"ui must be True, False, a port or 'HOST:PORT', got {ui!r}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def names(self) -> tuple[str, ...]:
        """Return the names by which a browser may ask for it, the first one for the link."""
        if self.host == "127.0.0.1":
            return self.host, "localhost"
        if self.host == EVERYWHERE:
            own, addresses = socket.gethostname(), []
            # A machine need not know itself by its name.
            with suppress(OSError):
                found = socket.getaddrinfo(own, None, socket.AF_INET)
                addresses = [str(about[4][0]) for about in found]
            names = (own, socket.getfqdn(), *addresses, "localhost", "127.0.0.1")
            return tuple(dict.fromkeys(names))
        return (self.host,)


def checked_token(token: str | None, address: Address) -> str | None:
    """Return the token of a page, that of the environment where none is given.

    Args:
        token: what lets browsers in; None for that of `VARIABLE`, if there is one.
        address: where the page is served.

    Raises:
        SettingError: it is too short, or other machines reach the page and there is none.
    """
    token = token or os.environ.get(VARIABLE) or None
    if token is None and not address.is_local:
        raise SettingError(
            f"other machines reach a page at {address.host}, so it needs a token: at least "
            f"{SHORTEST} characters in the environment variable {VARIABLE}; or leave the host out, "
            "and forward the port: ssh -L PORT:127.0.0.1:PORT HOST"
        )
    if token is not None and (len(token) < SHORTEST or not token.isascii()):
        raise SettingError(
            f"a page's token needs at least {SHORTEST} ASCII characters, got {len(token)}"
        )
    return token
