"""Numbers in settings that compiled functions take as arguments, so that one serves every value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, Self

Array = Any


class Composed(ABC):
    """Base class of values that hold settings by name without being a dataclass."""

    settings: Mapping[str, Any]

    @abstractmethod
    def composed(self, settings: Mapping[str, Any]) -> Self:
        """Return the same with other settings, which are not checked: some may be tracers."""


class Argument(float):
    """A number in settings whose value is an argument of what is compiled with these settings.

    Everywhere else it is the number that it holds.
    """

    name: str
    """The name of the argument."""
    path: str
    """The path of the setting, of which several may have one argument."""

    def __new__(cls, name: str, value: float, path: str = "") -> Self:
        """Make one with its name, the number that it holds, and its path."""
        made = super().__new__(cls, value)
        made.name, made.path = name, path
        return made

    def __eq__(self, other: object) -> bool:
        # Settings are the same whatever the values are, and this never passes for the plain number
        # that it holds.
        return isinstance(other, Argument) and self.name == other.name

    def __ne__(self, other: object) -> bool:
        # Not that of `float`, which compares the numbers.
        return not self == other

    def __hash__(self) -> int:
        return hash(("argument", self.name))


class Values(dict[str, Array]):
    """The values of arguments, by name."""

    def __init__(self, values: Mapping[str, Array] = MappingProxyType({})) -> None:
        super().__init__(values)
        self.read: set[str] = set()
        """The paths of the settings whose values were looked up."""

    def of(self, number: Argument) -> Array:
        """Return the value of a setting."""
        self.read.add(number.path)
        return self[number.name]


def substituted(value: Any, values: Values) -> Any:
    """Return a value with the values of arguments in their place.

    Fields of dataclasses and of `Composed` are searched too, and tuples of numbers.

    Args:
        value: any value.
        values: of the arguments.
    """
    if isinstance(value, Argument):
        return values.of(value)
    # A step may pass several of its fields to `ctx.run` as one tuple.
    if isinstance(value, tuple) and any(isinstance(x, Argument) for x in value):
        return tuple(substituted(x, values) for x in value)
    return _replaced(value, lambda _, x: substituted(x, values)) if _is_settings(value) else value


def with_arguments(value: Any, path: str, found: dict[str, float]) -> Any:
    """Return a value with an `Argument` in the place of each number among its settings.

    Args:
        value: any value.
        path: of the setting; it becomes the argument's name.
        found: filled with the numbers by their names.
    """

    def argument(path: str, number: float) -> Argument:
        found[path] = number
        return Argument(path, number, path)

    return with_numbers(value, path, argument)


def with_numbers(value: Any, path: str, replace: Callable[[str, float], Any]) -> Any:
    """Return a value with something else in the place of each number among its settings.

    A number of 0 stays as it is, for it often switches something off, and so do those that are not
    finite. Fields of dataclasses that compare by value are searched too, but for those that the
    dataclass names in `constants`, and so are the settings of `Composed`.

    Args:
        value: any value.
        path: of the setting.
        replace: returns what takes a number's place, from the path of the setting and the number.
    """
    if type(value) is float:
        return value if value == 0 or not math.isfinite(value) else replace(path, value)
    # One that is compared by what it is, and not by its fields, would be another one each time.
    if not _is_settings(value) or not compares_by_value(type(value)):
        return value
    constants = getattr(value, "constants", ())
    return _replaced(
        value,
        lambda name, x: x if name in constants else with_numbers(x, f"{path}.{name}", replace),
    )


def compares_by_value(kind: type) -> bool:
    """Return whether objects of a class compare by what they hold, and not by what they are."""
    return any("__eq__" in vars(base) for base in kind.__mro__[:-1])


def _is_settings(value: Any) -> bool:
    return isinstance(value, Composed) or (is_dataclass(value) and not isinstance(value, type))


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the settings of a composed value, by name."""
    if isinstance(value, Composed):
        return dict(value.settings)
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _replaced(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return settings with their fields changed, or themselves if no field becomes another object.

    Args:
        value: a dataclass, or a composed value.
        change: returns the new value of a field, from its name and its value.
    """
    old = _fields(value)
    new = {name: change(name, x) for name, x in old.items()}
    if all(new[name] is old[name] for name in old):
        return value
    if isinstance(value, Composed):
        return value.composed(new)
    # The constructor would check the values, which may be tracers.
    made = object.__new__(type(value))
    for name, x in new.items():
        object.__setattr__(made, name, x)
    # What the value found out about itself, and depends on no number, need not be found again.
    for name in getattr(value, "independent", ()):
        if name in vars(value):
            made.__dict__[name] = value.__dict__[name]
    return made
