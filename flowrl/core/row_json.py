"""Rows and other numbers as JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}
"""The texts that stand for infinite numbers, which JSON has no numbers for.

Every reader of JSON takes a text, and Python's and JavaScript's own conversions know these two.
"""


def row_json(row: Mapping[str, Any]) -> str:
    """Return a row as one JSON object.

    NaN, which says that there is no number, becomes null; an infinite number its text.

    >>> row_json({"loss": math.inf, "return_mean": math.nan})
    '{"loss": "Infinity", "return_mean": null}'
    """
    return json.dumps({name: plain_number(value) for name, value in row.items()})


def plain_number(value: Any) -> Any:
    """Return a number, or what stands for it in JSON; leave texts as they are."""
    if isinstance(value, str) or math.isfinite(value):
        return value
    if math.isnan(value):
        return None
    return "Infinity" if value > 0 else "-Infinity"


def numbers_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row that was read from JSON, with what `row_json` wrote for some.

    Older files have null for infinite numbers, too.

    >>> numbers_of({"loss": "-Infinity", "return_mean": None})
    {'loss': -inf, 'return_mean': nan}
    """
    return {name: _number(value) for name, value in plain.items()}


def _number(value: Any) -> Any:
    """Return the number that a value of JSON stands for, if it stands for one."""
    if isinstance(value, str):
        return INFINITE.get(value, value)
    return math.nan if value is None else value
