"""Ways to look at items: as text, one number by its name, and comparisons such as ``loss>10``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.items import Batch, Gradients, MultiBatch, Row, Tally, Trained
from flowrl.core.texts import amount
from flowrl.errors import SettingError, a

Array = Any
STATS = ("min", "mean", "max", "nan")
"""The statistics that may follow a field's name, such as ``reward.mean``. ``nan`` is the number of
values that are NaN; the others are computed from the values that are not."""
LONGEST = 2_000
"""The most characters that are shown of an item of a type that is not flowrl's."""
COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
"""The comparisons by their signs, the longer signs first, so that ``>`` is not read in ``>=``."""


class Comparison(NamedTuple):
    """A comparison of a named number with a constant, such as ``loss>10``."""

    name: str
    """The name of the number, as `number` takes it."""
    sign: str
    """One of `COMPARE`."""
    value: float
    """The constant."""

    def holds(self, number: float) -> bool:
        """Return whether the comparison is true of this number."""
        return COMPARE[self.sign](number, self.value)

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value:g}"


def comparison(text: str) -> Comparison:
    """Read a comparison. Nothing in the text is executed.

    Args:
        text: a name, a sign and a number.

    Raises:
        SettingError: the text is not of this kind.

    >>> comparison("obs.nan > 0")
    Comparison(name='obs.nan', sign='>', value=0.0)
    """
    match = re.fullmatch(rf"\s*([\w/.-]+?)\s*({'|'.join(COMPARE)})\s*(\S+)\s*", text)
    name, sign, number = match.groups() if match else ("", "", "nan")
    try:
        found: Comparison | None = Comparison(name, sign, float(number))
    except ValueError:
        found = None
    # No number is equal to NaN, above or below it.
    if found is None or math.isnan(found.value):
        raise SettingError(
            "takes a comparison of a name with a number, such as loss>10 or reward.mean<=0; "
            f"got {text.strip()!r}"
        )
    return found


def scalars(item: Any) -> list[str]:
    """Return the names of an item's plain numbers; its arrays may be abstract."""
    if isinstance(item, Row):
        return list(item)
    if isinstance(item, Trained):
        return ["steps", "lag_mean", "lag_max", *item.metrics.names]
    if isinstance(item, MultiBatch):
        return ["steps", *(f"{policy}.steps" for policy in item.batches)]
    if isinstance(item, Gradients):
        return ["steps", "batches", "valid", *item.metrics.names]
    return ["steps"] if isinstance(item, Batch) else []


def fields(item: Any) -> dict[str, Array]:
    """Return the arrays of an item by name.

    These are the fields and columns of a batch, the gradients of the parameters and their columns,
    or the feedback of an update. Those of a
    `MultiBatch` have the name of the policy first, such as ``red.reward``.
    """
    if isinstance(item, MultiBatch):
        return {f"{policy}.{name}": x for policy, name, x in _of_policies(item)}
    if isinstance(item, Batch):
        return {**item.columns, **item.data}
    if isinstance(item, Gradients):
        return {**item.columns, **item.params}
    return dict(item.feedback) if isinstance(item, Trained) else {}


def _of_policies(item: MultiBatch) -> Iterator[tuple[str, str, Array]]:
    """Yield the fields of each policy's batch: policy, name and array."""
    for policy, batch in item.batches.items():
        for name, x in fields(batch).items():
            yield policy, name, x


def number(item: Any, name: str) -> float | None:
    """Return one number of an item; None if it has none of this name.

    Args:
        item: a batch, the result of an update, a Row, or anything else.
        name: ``loss`` of an update, ``reward.mean`` of a batch, or any column of a Row.

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
    if name in ("steps", "batches", "valid"):
        return float(getattr(item, name))
    if isinstance(item, MultiBatch):
        return float(item[name.removesuffix(".steps")].steps)
    if name in ("lag_mean", "lag_max"):
        lag_mean, lag_max = item.lag
        return float(lag_max if name == "lag_max" else lag_mean)
    return float(item.metrics.values[item.metrics.names.index(name)])


def stats(x: Array) -> tuple[float, float, float, float]:
    """Return the statistics `STATS` of an array: least, mean, greatest, and the number of NaN.

    Those that do not exist are NaN: all of an array that holds no numbers, and the first three of
    one that holds only NaN.
    """
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (np.floating, np.integer, np.bool_)):
        return np.nan, np.nan, np.nan, np.nan
    known = np.asarray(x)
    # Types such as bfloat16 are NumPy's only by name.
    if known.dtype.kind not in "fiub":
        known = known.astype(np.float64)
    missing = 0
    # Nothing else is copied, for an array of images may be large.
    if known.dtype.kind == "f" and (missing := int(np.isnan(known).sum())):
        known = known[~np.isnan(known)]
    if not known.size:
        return np.nan, np.nan, np.nan, float(missing)
    # Sums of very large or infinite values overflow, which is no error here.
    with np.errstate(all="ignore"):
        mean = float(np.mean(known, dtype=np.float64))
    return float(known.min()), mean, float(known.max()), float(missing)


# -- as text


def brief(item: Any) -> str:
    """Return an item in a few words, such as ``a Batch [16, 4], 64 steps``."""
    match item:
        case Batch():
            rows, columns = item.shape[0], item.shape[1]
            return f"a Batch [{rows}, {columns}], {amount(Fraction(item.steps), 'step')}"
        case MultiBatch():
            shapes = [f"{policy} {list(batch.shape)}" for policy, batch in item.batches.items()]
            steps = amount(Fraction(item.steps), "step")
            return f"a MultiBatch of {', '.join(shapes)}, {steps}"
        case Gradients():
            steps = amount(Fraction(item.steps), "step")
            return f"Gradients of {amount(Fraction(item.batches), 'batch')}, {steps}"
        case Trained():
            return f"a Trained on {amount(Fraction(item.steps), 'step')}"
        case Tally():
            return f"a Tally of {amount(Fraction(len(item.updates)), 'update')}"
    return a(item)


def whole(item: Any) -> str:
    """Return all of an item as text.

    Each field is shown with its shape, type and statistics, and each metric with its value. An item
    of a type that is not flowrl's is shown as it prints.
    """
    match item:
        case Batch():
            parts = [_table("field", item.data)]
            parts += [_table("column", item.columns)] if item.columns else []
        case MultiBatch():
            parts = [f"{policy}: {whole(batch)}" for policy, batch in item.batches.items()]
        case Gradients():
            parts = [_numbers(item), _table("parameter", item.params)]
            parts += [_table("column", item.columns)]
        case Trained():
            parts = [_numbers(item)]
            parts += [_table("feedback", item.feedback)] if item.feedback else []
        case _:
            text = repr(item)
            parts = [text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."]
    return "\n".join([brief(item), *parts])


def _numbers(item: Any) -> str:
    """Return the plain numbers of an item but its steps, a line each."""
    shown = [(name, number(item, name)) for name in scalars(item) if name != "steps"]
    wide = max(len(name) for name, _ in shown)
    return "\n".join(f"  {name:<{wide}}  {value:.6g}" for name, value in shown)


def plain(item: Any) -> dict[str, Any]:
    """Return an item as plain data.

    Args:
        item: as it flows, or with shapes in place of arrays.

    Returns:
        ``brief``, the item in a few words; ``fields``, a list with the name, shape, type and
        `STATS` of each array, as texts; ``numbers`` by name; and ``text``, how it prints if its
        type is not flowrl's.
    """
    own = isinstance(item, Batch | Gradients | MultiBatch | Trained | Row)
    arrays = fields(item)
    numbers = [x for x in scalars(item) if not x.endswith("steps")]
    known = not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(item))
    return {
        "brief": brief(item),
        "fields": [*_rows(arrays)] if known else [*map(_shape, arrays, arrays.values())],
        "numbers": {name: number(item, name) for name in numbers} if known else {},
        "text": "" if own or not known else _printed(item),
    }


def _printed(item: Any) -> str:
    """Return how an item prints, or why it does not."""
    try:
        return repr(item)[:LONGEST]
    except Exception as error:  # noqa: BLE001 - a user's own code, of which a picture must not fail
        return f"{type(error).__name__}: {error}"


def _shape(name: str, x: Array) -> tuple[str, ...]:
    return name, str(list(x.shape)), str(x.dtype)


def _rows(arrays: Mapping[str, Array]) -> Iterator[tuple[str, ...]]:
    """Yield the name, shape, type and statistics of each array."""
    for name, x in arrays.items():
        numbers = ["-" if math.isnan(n) else f"{n:.4g}" for n in stats(x)]
        yield (*_shape(name, x), *numbers)


def _table(head: str, arrays: Mapping[str, Array]) -> str:
    """Return arrays as a table with a line for each, under a header that begins with `head`."""
    rows: list[tuple[str, ...]] = [(head, "shape", "type", "min", "mean", "max", "NaN")]
    rows += _rows(arrays)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table: three columns of text to the left, the numbers to the right."""
    texts = [f"{x:<{width}}" for x, width in zip(row[:3], widths[:3], strict=True)]
    numbers = [f"{x:>{width}}" for x, width in zip(row[3:], widths[3:], strict=True)]
    return f"  {'  '.join([*texts, *numbers])}".rstrip()
