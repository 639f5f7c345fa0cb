"""This machine and process: cores, how long they worked, environment variables, freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

KEPT_BYTES = 2**28
"""The freed memory that the main thread keeps at the end of its heap."""
AHEAD_BYTES = 2**26
"""The memory by which a heap grows at once, and which other threads keep at the end of theirs. A
page that nobody writes to takes none."""
LARGE_BYTES = 2**25
"""The size from which arrays get memory of their own; glibc allows no larger one."""


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> tuple[int, float]:
    """Return the cores of this machine, and the seconds that they worked since it was started.

    The seconds are NaN where the system does not report them.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.cpu_count() or 1, float("nan")
    cores: Iterable[str] = [line for line in lines if line.startswith("cpu") and line[3].isdigit()]
    # The fourth and fifth number are the time in which cores were idle or waited for a disk.
    user, nice, system, _, _, irq, soft = map(int, lines[0].split()[1:8])
    ticks = user + nice + system + irq + soft
    return max(1, len(list(cores))), ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def variables_kept(names: Iterable[str]) -> Iterator[None]:
    """After this context, let the environment variables of these names be what they were before.

    What one run sets would otherwise reach every process that its caller starts later.
    """
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def keep_freed_memory() -> None:
    """Let the C library keep memory that is freed, so that the next array takes it over.

    Else it gives that of larger arrays back to the system each time, which hands it out as pages of
    zeros: a millisecond of an update of 200,000 parameters. The user's own settings of glibc
    (``MALLOC_...``, ``GLIBC_TUNABLES``) stay, and other C libraries are left as they are.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    # Of these options glibc's own numbers, in malloc.h: trim threshold, top pad, mmap threshold.
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((-1, KEPT_BYTES), (-2, AHEAD_BYTES), (-3, LARGE_BYTES)):
            mallopt(option, size)
