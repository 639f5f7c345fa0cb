"""Observations of several environments, one a column, by the names of their fields."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Fields = dict[str, Array]


def copies(obs: Fields) -> Fields:
    """Return copies of observations, which the vector that returned them can't change any more."""
    return {name: x.copy() for name, x in obs.items()}


def column_of(obs: Fields, column: int) -> Fields:
    """Return a copy of the observation of one environment."""
    return {name: x[column].copy() for name, x in obs.items()}


def write(data: Fields, at: tuple[Array, Array], obs: Fields, **values: Array) -> None:
    """Write observations and values ``[B, ...]`` into rows of a rollout.

    Args:
        data: the rollout, ``[T, B, ...]``.
        at: the rows, and their columns, which alone are written.
        obs: the observations of all columns.
        **values: other fields of all columns.
    """
    for name, of_all in (obs | values).items():
        data[name][at] = of_all[at[1]]
