"""Looking at items: what they hold as text, one number of them by its name, and comparisons such as ``loss>10``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Batch, Row, Tally, Trained
from flowrl.core.texts import amount
from flowrl.errors import SettingError, a

Array = Any
STATS = ("min", "mean", "max", "nan")
"""What may stand behind a field's name: ``reward.mean``. All but ``nan``, the count of NaN, are those of the other values."""
LONGEST = 2_000
"""The most characters that are shown of an item that is nothing of flowrl's."""
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


class Comparison(NamedTuple):
    """``loss>10``."""

    name: str
    sign: str
    value: float

    def holds(self, number: float) -> bool:
        """Whether it is true of this number."""
        return COMPARE[self.sign](number, self.value)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value:g}"


def comparison(text: str) -> Comparison:
    """Read one. Nothing is executed.

    Raises:
        SettingError: it is not of that form.

    >>> comparison("obs.nan > 0")
    Comparison(name='obs.nan', sign='>', value=0.0)
    """
    match = re.fullmatch(rf"\s*([\w/.]+)\s*({'|'.join(COMPARE)})\s*(\S+)\s*", text)
    try:
        name, sign, number = match.groups() if match else ("", "", "")
        return Comparison(name, sign, float(number))
    except ValueError:
        raise SettingError(
            f"takes a comparison of a name with a number, such as loss>10 or reward.mean<=0; got {text.strip()!r}"
        ) from None


def scalars(item: Any) -> list[str]:
    """The names of an item's plain numbers; its arrays may be abstract."""
    if isinstance(item, Row):
        return list(item)
    if isinstance(item, Trained):
        return ["steps", "lag_mean", "lag_max", *item.metrics.names]
    return ["steps"] if isinstance(item, Batch) else []


def fields(item: Any) -> dict[str, Array]:
    """The arrays of an item by name: the fields and columns of a batch; the feedback of an update."""
    if isinstance(item, Batch):
        return {**item.columns, **item.data}
    return dict(item.feedback) if isinstance(item, Trained) else {}


def number(item: Any, name: str) -> float | None:
    """One number of an item: ``loss`` of an update, ``reward.mean`` of a batch, any column of a Row; None where it has none of this name.

    >>> number(Batch({"reward": np.array([[1.0], [np.nan]])}), "reward.nan")
    1.0
    """
    head, _, stat = name.rpartition(".")
    if stat in STATS and head in fields(item):
        return dict(zip(STATS, stats(fields(item)[head]), strict=True))[stat]
    if name not in scalars(item):
        return None
    if isinstance(item, Row):
        return item[name]
    if name == "steps":
        return float(item.steps)
    if name in ("lag_mean", "lag_max"):
        return float(item.lag[name == "lag_max"])
    return float(item.metrics.values[item.metrics.names.index(name)])


def stats(x: Array) -> tuple[float, float, float, float]:
    """Least, mean, greatest, and how many are NaN, of an array of numbers; NaN for those of which there is none."""
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        return (np.nan,) * 4
    every = np.asarray(x).astype(np.float64)
    some = every[~np.isnan(every)]
    with np.errstate(all="ignore"):
        low, mean, high = (
            (float(f(some)) for f in (np.min, np.mean, np.max)) if some.size else (np.nan,) * 3
        )
    return low, mean, high, float(every.size - some.size)


# -- as text -------------------------------------------------------------------------------------------------------


def brief(item: Any) -> str:
    """An item in a few words: ``a Batch [16, 4], 64 steps``."""
    match item:
        case Batch():
            return f"a Batch [{item.shape[0]}, {item.shape[1]}], {amount(Fraction(item.steps), 'step')}"
        case Trained():
            return f"a Trained on {amount(Fraction(item.steps), 'step')}"
        case Tally():
            return f"a Tally of {amount(Fraction(len(item.updates)), 'update')}"
    return a(item)


def whole(item: Any) -> str:
    """All of an item: each field with its shape, type and statistics, each metric with its value; what is nothing of flowrl's as it prints."""
    match item:
        case Batch():
            parts = [
                _table("field", item.data),
                *([_table("column", item.columns)] if item.columns else []),
            ]
        case Trained():
            shown = [(name, number(item, name)) for name in scalars(item) if name != "steps"]
            wide = max(len(name) for name, _ in shown)
            parts = ["\n".join(f"  {name:<{wide}}  {value:.6g}" for name, value in shown)]
            parts += [_table("feedback", item.feedback)] if item.feedback else []
        case _:
            text = repr(item)
            parts = [text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."]
    return "\n".join([brief(item), *parts])


def _table(head: str, arrays: Mapping[str, Array]) -> str:
    rows: list[tuple[str, ...]] = [(head, "shape", "type", "min", "mean", "max", "NaN")]
    for name, x in arrays.items():
        numbers = [f"{n:.4g}" if n == n else "-" for n in stats(x)]  # noqa: PLR0124 - NaN is not equal to itself
        rows.append((name, str(list(x.shape)), str(x.dtype), *numbers))
    wide = [max(len(row[i]) for row in rows) for i in range(7)]
    lines = ["  ".join([*(f"{x:<{w}}" for x, w in zip(row[:3], wide, strict=False)), *(f"{x:>{w}}" for x, w in zip(row[3:], wide[3:], strict=True))])
             for row in rows]  # fmt: skip
    return "\n".join(f"  {line}".rstrip() for line in lines)
