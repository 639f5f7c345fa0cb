"""What stock graphs do with the settings that they are given."""

from __future__ import annotations

from typing import TypeVar

from flowrl.errors import SettingError

S = TypeVar("S")


def given(settings: S | None, kind: type[S]) -> S:
    """The settings, or the defaults of their kind.

    Raises:
        SettingError: they are of another kind.
    """
    if settings is not None and not isinstance(settings, kind):
        raise SettingError(f"settings must be fl.{kind.__name__}(...), got {settings!r}")
    return kind() if settings is None else settings
