"""`Settings`: the base of frozen settings, whose mistakes of type are named by field."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Self

from flowrl.core.declared import check_declared
from flowrl.core.hints import hints_of
from flowrl.errors import FlowrlError, SettingError
from flowrl.graph.keywords import check_keywords
from flowrl.graph.values import fit


class Settings:
    """Base class of frozen settings.

    A check in `__post_init__` that fails at a value of a wrong type, such as ``"4" < 1``, becomes
    the error of the field that holds it. So does a float where a whole number is wanted, such as
    ``epochs=1.5``, which most comparisons take, NaN, which passes many of them, and a text where
    True or False is wanted. A setting that does not exist is refused with the names of those that
    do.
    """

    def __new__(cls, *_: Any, **named: Any) -> Self:
        """Refuse a name that is no field, before Python does without the names that there are."""
        check_keywords(cls, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the fields; what a class checks of its own comes in its own `__post_init__`."""
        _refuse_misfits(self)

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check what the class declares, and let its checks name the field at which they fail."""
        super().__init_subclass__(**keywords)
        check_declared(cls)
        if "__post_init__" in vars(cls):
            # For setattr, unlike an assignment, a type checker takes a method.
            setattr(cls, "__post_init__", _named(cls.__post_init__))  # noqa: B010


def _named(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return checks of a value's fields, whose errors name its class.

    A TypeError becomes the error of a field of a wrong type.
    """

    @wraps(check)
    def checked(value: Any) -> None:
        try:
            check(value)
        except TypeError:
            _refuse_types(value)
            raise
        except FlowrlError as error:
            error.of = error.of or type(value).__name__
            raise
        _refuse_misfits(value)

    return checked


def check_shares(settings: Any, *names: str) -> None:
    """Refuse fields that are not from 0 to 1.

    Args:
        settings: the settings that hold them.
        names: of the fields; one that is None is not checked, here and below.

    Raises:
        SettingError: with the first of them that is out of the range, here and below.
    """
    _check_range(settings, names, lambda x: 0 <= x <= 1, "be from 0 to 1")


def check_not_negative(settings: Any, *names: str) -> None:
    """Refuse fields that are negative."""
    _check_range(settings, names, lambda x: x >= 0, "not be negative")


def check_at_least_1(settings: Any, *names: str) -> None:
    """Refuse fields that are below 1."""
    # NaN is not below 1: what refuses it as no number comes after these checks.
    _check_range(settings, names, lambda x: not x < 1, "be at least 1")


def check_above_0(settings: Any, *names: str) -> None:
    """Refuse fields that are not above 0."""
    _check_range(settings, names, lambda x: x > 0, "be above 0")


def _check_range(
    settings: Any, names: tuple[str, ...], fits: Callable[[float], bool], wanted: str
) -> None:
    for name in names:
        if (found := getattr(settings, name)) is not None and not fits(found):
            may_be_none = type(None) in typing.get_args(_hints(type(settings)).get(name))
            raise SettingError(f"{name} must {wanted}{' or None' * may_be_none}, got {found}")


def _refuse_misfits(value: Any) -> None:
    """Raise an error for the first float that is NaN, or stands where a whole number is wanted.

    So it does for what stands where True or False is wanted: any text would count as True.

    Raises:
        SettingError: with the field.
    """
    kind: Any = type(value)
    for name, hint in _hints(kind).items():
        found = getattr(value, name, None)
        if isinstance(found, float) and math.isnan(found):
            raise SettingError(f"{kind.__name__}.{name} must be a number, got nan")
        if hint is bool and not isinstance(found, bool):
            fit(found, hint, f"{kind.__name__}.{name}")
    for name, hint in _whole_fields(kind).items():
        if isinstance(found := getattr(value, name, None), float):
            fit(found, hint, f"{kind.__name__}.{name}")


@cache
def _whole_fields(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a class that take ints and no floats."""
    return {
        name: hint
        for name, hint in _hints(kind).items()
        if int in (options := typing.get_args(hint) or (hint,)) and float not in options
    }


def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of what a class is given, by field."""
    try:
        hints = hints_of(kind)
    except NameError:
        # An annotation of a user's own class may be known to type checkers only.
        return {}
    # A class that is no dataclass has no fields.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: hints[field.name] for field in fields if field.init}


def _refuse_types(value: Any) -> None:
    """Raise an error for the first field of a wrong type, if there is one.

    Raises:
        SettingError: a field is not of the type that its annotation says.
    """
    for name, hint in _hints(type(value)).items():
        fit(getattr(value, name), hint, f"{type(value).__name__}.{name}")
