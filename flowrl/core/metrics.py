"""What operators and environments measure: gathered from every thread, and told with the next Row."""

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
from flowrl.errors import ContractError

Array = Any
MOST = 1_000
"""Arrays of one metric that stay on the device; when there are more of them before a Row closes, these are brought here."""
KINDS = (jnp.floating, jnp.integer, jnp.bool_)
SUFFIXES = ("", "/min", "/max")
"""Of the columns that each metric has."""


class Summed(NamedTuple):
    """A number of values: their sum, the least and the most of them. NaN where any is NaN."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @staticmethod
    def of(values: Any) -> Summed:
        """Of an array of numbers."""
        x = np.asarray(values, np.float64).reshape(-1)
        return (
            Summed(x.size, float(x.sum()), float(x.min()), float(x.max())) if x.size else Summed()
        )

    def plus(self, other: Summed) -> Summed:
        """Of both."""
        least, most = np.minimum(self.least, other.least), np.maximum(self.most, other.most)
        return Summed(
            self.number + other.number, self.total + other.total, float(least), float(most)
        )

    def columns(self, name: str) -> dict[str, float]:
        """As a Row tells it: the mean under the name itself, then the least and the most; NaN where no value came."""
        told = (self.total / self.number, self.least, self.most) if self.number else (math.nan,) * 3
        return dict(zip(names_of(name), told, strict=True))


def names_of(name: str) -> tuple[str, ...]:
    """The columns of a metric: ``x``, ``x/min`` and ``x/max``."""
    return tuple(f"{name}{suffix}" for suffix in SUFFIXES)


def misnamed(name: Any, prefix: str = "") -> str:
    """What is wrong with the name of a metric; nothing if it can be a column, behind `prefix`, beside those that every Row has.

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


class Metered:
    """What was measured since the last Row. Any thread may add to it."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """All that were ever told, each with who told it first."""
        self._lock = threading.Lock()
        self._sums: dict[str, Summed] = {}
        self._arrays: dict[str, list[Array]] = {}

    def expect(self, names: Iterable[str]) -> None:
        """These are told with every Row, NaN where there is no value."""
        with self._lock:
            for name in names:
                self.names.setdefault(name, "")

    def add(self, name: str, value: Any, by: str = "") -> None:
        """Add one value: a number, or an array of shape [], which stays where it is until the Row closes.

        Raises:
            ContractError: it is no such thing, or the name can't be a column.
        """
        if name not in self.names and (wrong := misnamed(name)):
            raise ContractError(wrong)
        if isinstance(value, jax.core.Tracer):
            raise ContractError(
                f"metric '{name}' is told within a compiled function; let that return it, and tell it outside"
            )
        if not isinstance(value, bool | int | float):
            shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", object)
            if shape != () or not any(jnp.issubdtype(dtype, kind) for kind in KINDS):
                got = repr(value) if shape is None else f"{dtype}{list(shape)}"
                raise ContractError(
                    f"metric '{name}' is one number or an array of shape [], got {got}; take its mean first: ctx.run(jnp.mean, x)"
                )
        with self._lock:
            self.names[name] = self.names.get(name) or by
            if isinstance(value, bool | int | float | np.ndarray | np.generic):
                self._sums[name] = self._sums.get(name, Summed()).plus(
                    Summed(1, *(float(value),) * 3)
                )
            elif not isinstance(value, jax.ShapeDtypeStruct):
                held = self._arrays.setdefault(name, [])
                held.append(value)
                if len(held) > MOST:
                    self._sums[name] = self._sums.get(name, Summed()).plus(
                        Summed.of([np.asarray(x) for x in held])
                    )
                    held.clear()

    def merge(self, sums: Mapping[str, Summed], by: str = "") -> None:
        """Add what was summed elsewhere."""
        with self._lock:
            for name, summed in sums.items():
                self.names[name] = self.names.get(name) or by
                self._sums[name] = self._sums.get(name, Summed()).plus(summed)

    def drain(self) -> dict[str, tuple[Summed, tuple[Array, ...]]]:
        """What there is, and forget it: by name what was summed up, and values that are not yet."""
        if not self.names:
            return {}
        with self._lock:
            sums, self._sums = self._sums, {}
            arrays, self._arrays = self._arrays, {}
            return {
                name: (sums.get(name, Summed()), tuple(arrays.get(name, ())))
                for name in sorted(self.names)
            }


def summed(drained: Mapping[str, tuple[Summed, tuple[Array, ...]]]) -> dict[str, Summed]:
    """What was drained, with all of it summed up. Waits for the device."""
    return {
        name: known.plus(Summed.of(jax.device_get(list(rest))))
        for name, (known, rest) in drained.items()
    }
