"""What is checked before Ray is joined or started, what it changes, and how a failure is worded.

Where an address or a token is wrong, Ray itself tries for two minutes, prints a page of text or
ends the process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flowrl.errors import RunError, SettingError

ANSWER_SECONDS = 5.0
"""How long the head of a cluster may take to answer."""
HOST_AND_PORT = re.compile(r"(?:\[[\da-fA-F:.]+\]|[\w.-]+):(\d+)")
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2, on which Ray's servers build, sends first: the preface, no settings."""

JOINED = (
    "this process is in a running Ray already, so address and init can't be used; leave them out, "
    "or call ray.shutdown() first"
)
STARTED: list[tuple[str | None, Mapping[str, Any]]] = []
"""Address and init with which this process started Ray for runs one after another: each of these
runs asks for the same, which it has."""
VARIABLES = {
    # This becomes Ray's own default; where it is unset, Ray warns.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Where one runner's error ends a run, the errors of the others need not be shown.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}
"""The environment variables with which Ray starts, unless they are set."""

AT_THE_HEAD = (
    "check that `ray start --head` runs on that machine, that the port is the one it printed "
    "(6379 by default), and that no firewall is in between"
)
OF_THE_HEAD = (
    "take the token of the cluster's head: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a "
    "file that holds what `ray get-auth-token` prints there"
)
OF_THE_FILE = (
    "let RAY_AUTH_TOKEN_PATH name a file that holds what `ray get-auth-token` prints on the "
    "cluster's head, or unset it, so that Ray reads ~/.ray/auth_token"
)
FAULTS = (
    (r"RAY_AUTH_TOKEN_PATH is set", OF_THE_FILE),
    (r"(?i)unauthenticated|authentication", OF_THE_HEAD),
    (r"(?i)version mismatch", "install on every node what the head has: Python, ray and flowrl"),
    (
        r"(?i)no ray processes|matched raylet|raylet address|this node has an IP",
        "start flowrl on a machine of the cluster, which `ray start --address` makes this one",
    ),
    (r"(?i)timed out|failed to connect|connection", AT_THE_HEAD),
)
"""What Ray says of a fault, as a pattern, and the way out of it."""


def check_address(address: str, source: str = "address") -> None:
    """Refuse the address of a Ray that can't be one.

    Args:
        address: such as ``10.0.0.5:6379``; also ``auto`` and ``local``, as Ray takes them.
        source: where the address is from, for the error.

    Raises:
        SettingError: it is something else.
    """
    if address in ("auto", "local"):
        return
    found = HOST_AND_PORT.fullmatch(address) if isinstance(address, str) else None
    if found is not None and 0 < int(found[1]) < 2**16:
        return
    because = ""
    if str(address).startswith("ray://"):
        because = ", for flowrl has to run on a machine of the cluster, not as a client of Ray"
    raise SettingError(
        f"{source} must be HOST:PORT of the head of a Ray cluster, such as 10.0.0.5:6379, or "
        f"'auto' for the one on this machine, got {address!r}{because}"
    )


def unreachable(address: str) -> str | None:
    """Return why Ray can't be reached at an address, and the way out; None if it answers.

    Args:
        address: as `check_address` takes it.
    """
    if not HOST_AND_PORT.fullmatch(address):
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=ANSWER_SECONDS
        ) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return None  # what it answers is encrypted
            connection.sendall(GREETING)
            answer = connection.recv(9)
    except OSError as error:
        return f"{_reason(error, host)}; {AT_THE_HEAD}"
    # The fourth byte is the kind of a frame, and a server's first frame holds its settings.
    if answer[3:4] != b"\x04":
        return f"what listens there is not Ray; {AT_THE_HEAD}"
    return None


def _reason(error: OSError, host: str) -> str:
    """Return in words why a machine can't be reached."""
    if isinstance(error, socket.gaierror):
        return f"no machine of the name {host} is known here"
    if isinstance(error, TimeoutError):
        return f"there was no answer in {ANSWER_SECONDS:g} seconds"
    return f"nobody listens there ({error.strerror or error})"


def place_to_join(address: str | None, variables: Mapping[str, str], graph: str) -> str:
    """Return the address of the Ray to join, or ``local`` to start one.

    Args:
        address: as `RayRuntime` takes it.
        variables: of the environment, of which ``RAY_ADDRESS`` is one.
        graph: the graph's name, for errors.

    Raises:
        SettingError: ``RAY_ADDRESS`` or ``RAY_AUTH_MODE`` is none.
        RunError: there is no Ray at the address.
    """
    # Without an address Ray would join whatever ran here last, even if that is dead.
    where = address or variables.get("RAY_ADDRESS") or "local"
    check_address(where, "RAY_ADDRESS" if address is None else "address")
    mode = variables.get("RAY_AUTH_MODE", "disabled")
    if mode.lower() not in ("disabled", "token"):
        raise SettingError(
            f"RAY_AUTH_MODE must be token or disabled, got {mode!r}, which Ray takes for disabled"
        )
    if (fault := unreachable(where)) is not None:
        raise RunError(f"Ray could not be joined at {where}: {fault}", graph)
    return where


def fault_in(text: str) -> str:
    """Return the line of a text of Ray's that names the fault: of a traceback the last one.

    >>> fault_in("Version mismatch: the cluster has:" + chr(10) + "  Ray: 2.60")
    'Version mismatch: the cluster has: Ray: 2.60'
    >>> fault_in("The actor died." + chr(10) + "  pid: 7" + chr(10) + "  ip: 10.0.0.5")
    'The actor died (on 10.0.0.5)'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    if any(line.startswith("File ") for line in lines):
        return lines[-1]
    # A line that ends with a colon says nothing without those after it.
    if lines[0].endswith(":"):
        return " ".join(lines)
    # Of a process that has ended, Ray names the machine among the lines after the first.
    machine = [line.removeprefix("ip: ") for line in lines if line.startswith("ip: ")]
    return f"{lines[0].rstrip('.')} (on {machine[0]})" if machine else lines[0]


def with_way_out(text: str) -> str:
    """Return what Ray says of a fault with the way out of it, if it is a known one.

    Args:
        text: a line of Ray's.
    """
    ways = [way for pattern, way in FAULTS if re.search(pattern, text)]
    return f"{text.rstrip('.')}; {ways[0]}" if ways else text


def saved_init(init: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved run may note of the keyword arguments for `ray.init`.

    They may hold secrets, such as environment variables. A folder that is copied to the nodes is
    none; an address of one may have a key in it.
    """
    folder = dict(init.get("runtime_env") or {}).get("working_dir")
    if not isinstance(folder, str) or "://" in folder:
        return {}
    return {"runtime_env": {"working_dir": folder}}


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Put back this program's handler of SIGTERM, in whose place `ray.init` puts one that exits.

    A job scheduler ends a program by SIGTERM, and a run that exits at once would not be saved.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Where the program has no handler of its own, Ray's lets it end its processes.
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
