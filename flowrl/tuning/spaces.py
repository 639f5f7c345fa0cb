"""The spaces that settings are searched in, in Python and as a text of the command line."""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.algos.named import parse_value
from flowrl.errors import SaveError, SettingError, unknown
from flowrl.graph.values import to_text

LARGEST = 2**53
"""The largest whole number up to which floats have each of them."""
Point = float | int | str
"""A value of a space as a study keeps it: a number, or the text of an option."""


class Space(ABC):
    """The values of one setting among which a study searches."""

    @abstractmethod
    def distribution(self) -> Any:
        """Return the space as Optuna has it. Its values are points."""

    @abstractmethod
    def examples(self) -> Sequence[Point]:
        """Return points that show whether the setting takes every value of the space."""

    def options_in_order(self) -> Sequence[Point] | None:
        """Return all points; None where there is no end of them."""
        return None

    def value(self, point: Point) -> Any:
        """Return what the setting gets for a point."""
        return point


@dataclass(frozen=True)
class _Range(Space):
    """All numbers between two."""

    low: float
    high: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        for bound in (self.low, self.high):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise SettingError(f"{name} takes two numbers, got {bound!r}")
            if not math.isfinite(bound):
                raise SettingError(f"{name} takes two finite numbers, got {bound!r}")
        if self.low >= self.high:
            raise SettingError(
                f"{name} takes a lower number first, got {self.low!r} and {self.high!r}"
            )

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.low!r}, {self.high!r})"

    def examples(self) -> Sequence[Point]:
        """Return both ends."""
        return self.low, self.high


@dataclass(frozen=True)
class Uniform(_Range):
    """Fractional numbers between two, each as likely as another.

    Args:
        low: the least of them.
        high: the greatest of them.

    Raises:
        SettingError: these are no two numbers, the lower one first.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # A study compares its space with the saved one: 1 and 1.0 are the same bound.
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    def distribution(self) -> Any:
        """Return the space as Optuna has it."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high)


@dataclass(frozen=True)
class LogUniform(Uniform):
    """Fractional numbers between two, whose logarithms are each as likely as another.

    Args:
        low: the least of them, above 0.
        high: the greatest of them.

    Raises:
        SettingError: these are no two numbers above 0, the lower one first.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise SettingError(f"LogUniform takes numbers above 0, got {self.low!r}")

    def distribution(self) -> Any:
        """Return the space as Optuna has it."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=True)


@dataclass(frozen=True)
class RandInt(_Range):
    """Whole numbers from one to another, each as likely as another.

    Args:
        low: the least of them.
        high: the greatest of them, which is one of them.

    Raises:
        SettingError: these are no two whole numbers, the lower one first.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for bound in (self.low, self.high):
            if not isinstance(bound, int):
                raise SettingError(f"RandInt takes two whole numbers, got {bound!r}")
            if abs(bound) > LARGEST:
                raise SettingError(
                    f"RandInt takes whole numbers up to {LARGEST}, for the search counts in "
                    f"floats, got {bound!r}"
                )

    def distribution(self) -> Any:
        """Return the space as Optuna has it."""
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high)

    def options_in_order(self) -> Sequence[Point]:
        """Return all numbers."""
        return range(self.low, self.high + 1)


class Choice(Space):
    """Some values in no order.

    >>> print(Choice(0, 0.01))
    choice(0, 0.01)

    Args:
        options: the values: numbers, words, tuples, or values of flowrl such as `fl.Linear`.

    Raises:
        SettingError: there are fewer than two, two are the same, or one can't be written as text.
    """

    def __init__(self, *options: Any) -> None:
        self.options = tuple(options)
        try:
            self.texts = tuple(
                to_text(option, defaults=False, strict=True, width=math.inf) for option in options
            )
        except SaveError as error:
            raise SettingError(
                f"Choice: an option can't be written as text, which a study needs ({error}); "
                "name it in a module, or search a setting of a function of your own that makes it"
            ) from None
        if len(set(self.texts)) < max(2, len(self.texts)):
            raise SettingError(f"Choice takes two or more different values, got {options!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and other.texts == self.texts

    def __hash__(self) -> int:
        return hash(self.texts)

    def __repr__(self) -> str:
        return f"Choice({', '.join(self.texts)})"

    def __str__(self) -> str:
        return f"choice({', '.join(self.texts)})"

    def distribution(self) -> Any:
        """Return the space as Optuna has it: the texts of the options."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.texts)

    def examples(self) -> Sequence[Point]:
        """Return all of them."""
        return self.texts

    def options_in_order(self) -> Sequence[Point]:
        """Return all of them."""
        return self.texts

    def value(self, point: Point) -> Any:
        """Return the option of a text."""
        return self.options[self.texts.index(str(point))]


SPACES = {
    "loguniform": LogUniform,
    "uniform": Uniform,
    "randint": RandInt,
    "choice": Choice,
}
"""By name on the command line: each space."""
FORM = "NAME=SPACE, such as 'lr=loguniform(1e-5, 1e-2)' or 'ent_coef=choice(0, 0.01)'"


def parse_search(texts: Sequence[str], allow: Collection[str] = ()) -> dict[str, Space]:
    """Return the spaces that ``--search NAME=SPACE`` gives, by name of the setting.

    >>> print(parse_search(["lr=loguniform(1e-5, 1e-2)"])["lr"])
    loguniform(1e-05, 0.01)

    Args:
        texts: what the user wrote, once for each ``--search``.
        allow: packages beyond flowrl that an option may import.

    Raises:
        SettingError: a text is no such thing; the message names it.
        GraphError: an option is not written as a value.
    """
    found: dict[str, Space] = {}
    for text in texts:
        name, equals, space = text.partition("=")
        name = name.strip()
        if not equals or not name or not space.strip():
            raise SettingError(f"--search takes {FORM}; got {text!r}")
        if name in found:
            raise SettingError(f"--search {text!r}: {name} has a space already; give it one")
        found[name] = parse_space(space, allow, f"--search {text!r}")
    return found


def parse_space(text: str, allow: Collection[str] = (), source: str = "space") -> Space:
    """Return the space that a text such as ``loguniform(1e-5, 1e-2)`` is.

    Args:
        text: what the user wrote, or what a space prints.
        allow: packages beyond flowrl that an option may import.
        source: where the text is from, for errors.

    Raises:
        SettingError: it is none.
        GraphError: an option is not written as a value.
    """
    text = text.strip()
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        raise SettingError(f"{source}: a space is one of {_forms()}")
    kind = SPACES.get(call.func.id)
    if kind is None:
        raise SettingError(f"{source}: {unknown('space', call.func.id, SPACES)}")
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise SettingError(f"{source}: {text} takes values one by one, not *values")
    if kind is not Choice and len(call.args) != 2:
        raise SettingError(f"{source}: {call.func.id} takes two numbers, {call.func.id}(low, high)")
    # Every argument is read as `--set` reads a value.
    words = [str(ast.get_source_segment(text, argument)) for argument in call.args]
    options = [parse_value(word, allow=allow, source=source) for word in words]
    try:
        made: Space = kind(*options)
    except SettingError as error:
        raise SettingError(f"{source}: {error}") from None
    return made


def _forms() -> str:
    """Return all spaces as they are written."""
    forms = [f"{name}(low, high)" for name in SPACES if name != "choice"]
    return ", ".join([*forms, "choice(x, y, ...)"])


def values_of(search: Mapping[str, Space], points: Mapping[str, Point]) -> dict[str, Any]:
    """Return what the settings get for their points, by name."""
    return {name: space.value(points[name]) for name, space in search.items()}
