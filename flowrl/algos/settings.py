"""Checks of the settings objects that are given to the stock graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from flowrl.errors import SettingError, unknown

S = TypeVar("S")


def given(settings: S | None, kind: type[S], changes: Mapping[str, Any]) -> S:
    """Return the settings, or the defaults of `kind` where none are given, with some changed.

    Args:
        settings: what the caller of a stock graph gave.
        kind: the settings class of that graph, such as `PPOSettings`.
        changes: single settings by name, which the caller gave as keyword arguments.

    Raises:
        SettingError: the settings are not a `kind`, or it has no setting of such a name.
    """
    if settings is not None and not isinstance(settings, kind):
        raise SettingError(f"settings must be fl.{kind.__name__}(...), got {settings!r}")
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in changes:
        if name not in names:
            raise SettingError(unknown("setting", name, names))
    return replace(kind() if settings is None else settings, **changes)  # type: ignore[type-var]
