"""This machine and process: its cores, how long they worked, its environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


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
