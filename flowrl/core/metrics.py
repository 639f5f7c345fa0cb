"""Metrics of operators and environments, gathered from every thread for the next Row."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import COLUMNS
from flowrl.core.keeping import Keeping
from flowrl.core.remote import is_array
from flowrl.errors import ContractError

Array = Any
MOST = 1_000
"""The arrays of one metric that may stay on the device.

When there are more of them before a Row closes, they are brought to this process and summed up.
"""
KINDS = (jnp.floating, jnp.integer, jnp.bool_)
"""The kinds of arrays that a metric may be."""
SUFFIXES = ("", "/min", "/max")
"""The ends of the names of the columns that each metric has: mean, minimum and maximum."""


class Summed(NamedTuple):
    """Summary of values: how many there are, their sum, and the least and the most of them.

    The sum, the least and the most are NaN where any value is NaN.
    """

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @staticmethod
    def of(values: Any) -> Summed:
        """Return the summary of an array of numbers."""
        x = np.asarray(values, np.float64).reshape(-1)
        if not x.size:
            return Summed()
        return Summed(x.size, float(x.sum()), float(x.min()), float(x.max()))

    def plus(self, other: Summed) -> Summed:
        """Return the summary of the values of both."""
        # NumPy's minimum of a NaN is NaN; Python's depends on the order.
        least, most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        return Summed(
            self.number + other.number, self.total + other.total, float(least), float(most)
        )

    def columns(self, name: str) -> dict[str, float]:
        """Return the columns of a Row: the mean under the name itself, then the least and the most.

        They are NaN where there is no value.
        """
        values = (math.nan,) * 3
        if self.number:
            values = (self.total / self.number, self.least, self.most)
        return dict(zip(names_of(name), values, strict=True))


def names_of(name: str) -> tuple[str, ...]:
    """Return the names of a metric's columns: ``x``, ``x/min`` and ``x/max``."""
    return tuple(f"{name}{suffix}" for suffix in SUFFIXES)


def misnamed(name: Any, prefix: str = "") -> str:
    """Return what is wrong with the name of a metric; empty if nothing is.

    It must be able to be a column beside those that every Row has.

    Args:
        name: the name.
        prefix: what stands before the name in the column.

    >>> misnamed("loss")
    "'loss' is a column that every Row has already; give the metric another name"
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w./-]+", name):
        return f"the name of a metric is made of letters, digits and _ . / -, got {name!r}"
    if not prefix and name in (*COLUMNS, "dropped_steps", "restarts", "lost_steps"):
        return f"'{name}' is a column that every Row has already; give the metric another name"
    if (not prefix and name.startswith(("eval/", "env/"))) or name.endswith(SUFFIXES[1:]):
        return f"'{name}' is what flowrl itself may call a column; give the metric another name"
    return ""


class Metered(Keeping):
    """Metrics that were measured since the last Row; any thread may add to them."""

    lasting = ("names", "_sums", "_arrays")
    remade = ("_lock",)

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """All metrics that were ever reported, each with who reported it first."""
        self._lock = threading.Lock()
        self._sums: dict[str, Summed] = {}
        self._arrays: dict[str, list[Array]] = {}

    def expect(self, names: Iterable[str]) -> None:
        """Report these metrics with every Row, NaN where there is no value."""
        with self._lock:
            for name in names:
                self.names.setdefault(name, "")

    def add(self, name: str, value: Any, by: str = "") -> None:
        """Add one value of a metric.

        Args:
            name: the name of the metric.
            value: a number, or an array of shape [], which stays where it is until the Row closes.
            by: who reports it.

        Raises:
            ContractError: the value is neither, or the name can't be a column.
        """
        if name not in self.names and (wrong := misnamed(name)):
            raise ContractError(wrong)
        _check_value(name, value)
        with self._lock:
            self.names[name] = self.names.get(name) or by
            if isinstance(value, bool | int | float | np.ndarray | np.generic):
                number = float(value)
                self._plus(name, Summed(1, number, number, number))
            # A shape of the abstract trace has no value, but its metric is known from now on.
            elif not isinstance(value, jax.ShapeDtypeStruct):
                self._keep(name, value)

    def _plus(self, name: str, summed: Summed) -> None:
        """Add a summary to that of a metric, with the lock held."""
        self._sums[name] = self._sums.get(name, Summed()).plus(summed)

    def _keep(self, name: str, array: Array) -> None:
        """Keep an array where it is, with the lock held; too many of them are summed up."""
        kept = self._arrays.setdefault(name, [])
        kept.append(array)
        if len(kept) > MOST:
            self._plus(name, Summed.of([np.asarray(x) for x in kept]))
            kept.clear()

    def merge(self, sums: Mapping[str, Summed], by: str = "") -> None:
        """Add summaries that another process made.

        Args:
            sums: the summaries by metric.
            by: who reports them.
        """
        with self._lock:
            for name, summed in sums.items():
                self.names[name] = self.names.get(name) or by
                self._plus(name, summed)

    def drain(self) -> dict[str, tuple[Summed, tuple[Array, ...]]]:
        """Return all values and forget them.

        They are, by metric, the summary so far and the arrays that are not in it yet.
        """
        # Most graphs have no metrics, and need no lock.
        if not self.names:
            return {}
        with self._lock:
            # Exchanged under the lock, so that no value is lost or counted twice.
            sums, self._sums = self._sums, {}
            arrays, self._arrays = self._arrays, {}
            return {
                name: (sums.get(name, Summed()), tuple(arrays.get(name, ())))
                for name in sorted(self.names)
            }


def _check_value(name: str, value: Any) -> None:
    """Refuse a value that is neither a number nor an array of shape []."""
    if isinstance(value, jax.core.Tracer):
        raise ContractError(
            f"metric '{name}' is reported within a compiled function; "
            "let that return it, and report it outside"
        )
    if isinstance(value, bool | int | float):
        return
    number = is_array(value) and any(jnp.issubdtype(value.dtype, kind) for kind in KINDS)
    if not number or value.shape != ():
        got = f"{value.dtype}{list(value.shape)}" if is_array(value) else repr(value)
        raise ContractError(
            f"metric '{name}' is one number or an array of shape [], got {got}; "
            "take its mean first: ctx.run(jnp.mean, x)"
        )


def summed(drained: Mapping[str, tuple[Summed, tuple[Array, ...]]]) -> dict[str, Summed]:
    """Return the summaries of drained metrics, arrays included; this waits for the device."""
    return {
        name: so_far.plus(Summed.of(jax.device_get(list(arrays))))
        for name, (so_far, arrays) in drained.items()
    }
