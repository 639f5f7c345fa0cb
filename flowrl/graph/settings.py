"""`Settings`: the base of frozen settings, whose mistakes of type are named by field."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

from flowrl.core.declared import check_declared
from flowrl.graph.values import fit


class Settings:
    """Base class of frozen settings.

    A check in `__post_init__` that fails at a value of a wrong type, such as ``"4" < 1``, becomes
    the error of the field that holds it.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check what the class declares, and let its checks name the field at which they fail."""
        super().__init_subclass__(**keywords)
        check_declared(cls)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _named(cls.__post_init__)  # type: ignore[attr-defined]


def _named(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return checks of a value's fields whose TypeError becomes that of a field of a wrong type."""

    @wraps(check)
    def checked(value: Any) -> None:
        try:
            check(value)
        except TypeError:
            _refuse_types(value)
            raise

    return checked


def _refuse_types(value: Any) -> None:
    """Raise an error for the first field of a wrong type, if there is one.

    Raises:
        SettingError: a field is not of the type that its annotation says.
    """
    try:
        hints = typing.get_type_hints(type(value))
    except NameError:
        # An annotation of a user's own class may be known to type checkers only.
        return
    for field in dataclasses.fields(value):
        if field.init:
            fit(
                getattr(value, field.name),
                hints[field.name],
                f"{type(value).__name__}.{field.name}",
            )
