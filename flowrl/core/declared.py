"""What classes declare of themselves, names and flags, checked where such a class is written."""

from __future__ import annotations

from typing import Any

from flowrl.errors import SettingError

NAMES, FLAG = "ClassVar[tuple[str, ...]]", "ClassVar[bool]"
"""The annotations of what is checked."""


def check_declared(kind: type) -> None:
    """Refuse a class whose own names are no names, or whose flags are neither True nor False.

    ``needs = ("action")`` is a text, for a comma is missing, and code that goes through it finds
    letters. A property, which decides by the object, is left alone.

    Raises:
        SettingError: with the class, the name and what to write.
    """
    annotated: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        annotated |= vars(base).get("__annotations__", {})
    for name, value in vars(kind).items():
        if isinstance(value, property):
            continue
        if annotated.get(name) == NAMES and not _are_names(value):
            such = f"({value!r},)" if isinstance(value, str) else "('obs', 'action')"
            raise SettingError(
                f"{kind.__name__}.{name} must be a tuple of names such as {such}, got {value!r}"
            )
        if annotated.get(name) == FLAG and not isinstance(value, bool):
            raise SettingError(f"{kind.__name__}.{name} must be True or False, got {value!r}")


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(x, str) for x in value)


def hidden(owner: Any, base: type) -> str:
    """Return what is wrong with a field that hides an attribute of the base class; empty if none.

    A field of the same type is no mistake: it sets per value what other classes set for all.
    """
    for name, value in vars(owner).items():
        if name in vars(base) and type(value) is not type(vars(base)[name]):
            means = f"its field {name}={value!r} hides {base.__name__}.{name}"
            return f"{means}, which has another meaning; give the field another name"
    return ""
