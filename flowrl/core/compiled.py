"""The owner of all that is compiled in a process: functions and programs, of which the newest are kept for the runs to come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from threading import Lock
from types import ModuleType
from typing import Any

import jax

from flowrl.core.clock import IDLE, here
from flowrl.errors import ContractError, a, raised

COMPILING = "/jax/core/compile/"
"""How JAX names what it measures of that."""
FUNCTIONS = 32
"""Compiled functions that are kept once no run holds them. A run has 3 to 12, and one takes about 10 MB."""
MOST = 500
"""Functions that one run may compile."""
PROGRAMS = 4
"""Compiled programs of the xla runtime that are kept."""


def jitted(fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]) -> Any:
    """Return the compiled form of a function with its static settings: one and the same for equal ones of equal types.

    Only the newest are kept here, or every setting that was ever tried would stay in memory. Whoever
    calls one often holds it as long as that lasts, as `Place.jitted` does.
    """
    return kept(fn, donate, static, tuple(type(value) for _, value in static))


@lru_cache(maxsize=FUNCTIONS)
def kept(
    fn: Callable[..., Any],
    donate: tuple[int, ...],
    static: tuple[tuple[str, Any], ...],
    types: tuple[type, ...],  # noqa: ARG001 - it is part of the cache's key
) -> Any:
    """Hold what `jitted` returns. The types of the settings distinguish 2 from 2.0, which Python takes for equal."""
    check_pure(fn)
    return jax.jit(partial(fn, **dict(static)), donate_argnums=donate)


class Recent:
    """A bounded cache: the values of the keys that were asked for last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made if it is not there; made each time for a key that can't be compared, as with an array in it."""
        comparable = True
        try:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        except (TypeError, ValueError):
            comparable = False
        value = make()  # without the lock: it may take minutes
        if comparable:
            with self._lock:
                self._kept[key] = value
                while len(self._kept) > self.most:
                    self._kept.popitem(last=False)
        return value


programs = Recent(PROGRAMS)


def check_count(count: int, fn: Callable[..., Any]) -> None:
    """Refuse to compile a function for a run that has compiled more of them than any graph has.

    Raises:
        ContractError: with the way out.
    """
    if count >= MOST:
        name = getattr(fn, "__name__", repr(fn))
        raise ContractError(
            f"{name} would be function number {count + 1} that this run compiles: does each item define it again, or give it other keywords? "
            "Define it once, at the top of its module, and give it what changes as an array among its positional arguments"
        )


def check_pure(fn: Callable[..., Any]) -> None:
    """Refuse a method of an object that may change: what is compiled holds its fields as they are now.

    Raises:
        ContractError: with the way out.
    """
    owner = getattr(fn, "__self__", None)
    kind = type(owner)
    if (
        owner is None
        or isinstance(owner, type | ModuleType)
        or kind.__module__.startswith("flowrl.")
        or "__eq__" in {name for base in kind.__mro__[:-1] for name in vars(base)}
    ):
        return
    raise ContractError(
        f"{getattr(fn, '__name__', 'it')} is a method of {a(owner)}, whose fields may change after it is compiled; make {kind.__name__} a frozen "
        "dataclass, or give a plain function all that it reads as arguments"
    )


def _compiled(event: str, duration_secs: float, **_: Any) -> None:
    """Book what JAX took to trace and compile a function as `start`: it is no work of the node that called the function first."""
    clock = here()
    if event.startswith(COMPILING) and clock.stack[-1] not in IDLE:
        clock.move(duration_secs, clock.stack[-1], "start")


jax.monitoring.register_event_duration_secs_listener(_compiled)


def told(error: Exception) -> str:
    """An error of a user's own code, and the way out where it met a shape."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "a function for ctx.run computes with jax.numpy, not numpy (np.clip becomes jnp.clip): it is compiled, and so sees no values"
    hints = {
        "ShapeDtypeStruct": "while a graph is checked a step sees shapes: put maths on arrays into ctx.run(function, ...)",
        "read-only": "other nodes may have the same item: change a copy of the array, and give batch.with_(name=copy)",
    }
    return "; ".join([raised(error), *(hint for sign, hint in hints.items() if sign in str(error))])
