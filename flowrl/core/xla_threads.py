"""How many threads of a CPU XLA computes with, or a GPU in their place, by the size of the work.

XLA reads the number once, when its client starts, and hands even small operations to its pool. So
a process has, beside JAX's own client, one for each other number that is wanted; functions run on
that of the default device. Such a client computes in the thread that calls, if that would wait for
the result anyway: handing a small function to another thread takes longer than computing it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax

from flowrl.core.machine import usable_cores, variables_kept

NPROC = "NPROC"
"""The environment variable in which XLA looks for the number of its threads."""
LARGE = 80e6
"""The floating-point operations of a gradient step from which on a thread a core is faster.

`docs/benchmarks/threads.md` has the measurements.
"""
LARGE_FOR_GPU = 20e6
"""Those from which on a GPU is faster, where actions are chosen in calls of their own.

On an H200 (`docs/benchmarks/gpu-nvidia-h200.md`) a step of ppo, with 7 million in a gradient step,
takes 2.8 times as long as on a core, most of it for calls. A core, whose time grows with the
operations, would take as long with about 25 million.
"""


def computing(threads: int | None, ahead: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which this thread's functions run with so many threads of XLA.

    Args:
        threads: the number, on the CPU even where there is a GPU; None for JAX's own client.
        ahead: whether this thread goes on while they are computed (default False).
    """
    device = None if threads is None else _device(threads, ahead)
    return nullcontext() if device is None else jax.default_device(device)


def computes_on_cpu(threads: int | None) -> bool:
    """Return whether functions run on the CPU within `computing` of so many threads."""
    if jax.default_backend() == "cpu":
        return True
    return threads is not None and _device(threads, False) is not None


def clients() -> list[Any]:
    """Return the clients of XLA in this process: JAX's own, and those of other thread numbers."""
    return [jax.devices()[0].client, *_made]


_made: list[Any] = []


@cache
def _device(threads: int, ahead: bool) -> Any:
    """Return the device of a client with so many threads; None where JAX's own is to serve.

    So it is where the user chose a number, a device or a platform, and where JAX has several
    devices.
    """
    config: Any = jax.config
    on_cpu = jax.default_backend() == "cpu"
    chosen = NPROC in os.environ or config.jax_default_device is not None
    if chosen or jax.device_count() > 1 or (config.jax_platforms and not on_cpu):
        return None
    # With one core JAX's own client has one thread as well, but not the one that calls.
    if threads == usable_cores() and threads > 1:
        return None if on_cpu else jax.local_devices(backend="cpu")[0]
    try:
        # There is no public way to make a client.
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        with variables_kept([NPROC]):
            os.environ[NPROC] = str(threads)
            client: Any = xla_client.make_cpu_client(asynchronous=ahead)
        _made.append(client)
        return client.local_devices()[0]
    except (ImportError, AttributeError, TypeError):
        return None
