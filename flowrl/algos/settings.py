"""Checks of the settings objects that are given to the stock graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from flowrl.errors import SettingError

S = TypeVar("S")

OF_DEFAULT_POLICY = (
    *("hidden", "normalize", "dueling", "alpha", "critics", "mixing"),
    *("cell", "size", "atoms", "v_min", "v_max"),
)
"""The settings that describe the policy which a stock graph takes where none is given."""


def given(settings: S | None, kind: type[S], changes: Mapping[str, Any]) -> S:
    """Return the settings, or the defaults of `kind` where none are given, with some changed.

    Args:
        settings: what the caller of a stock graph gave.
        kind: the settings class of that graph, such as `PPOSettings`.
        changes: single settings by name, which the caller gave as keyword arguments.

    Raises:
        SettingError: the settings are not a `kind`, it has no setting of such a name, or one of the
            changes describes the default policy although another one is given.
    """
    if settings is not None and not isinstance(settings, kind):
        raise SettingError(f"settings must be fl.{kind.__name__}(...), got {settings!r}")
    changed = replace(kind() if settings is None else settings, **changes)  # type: ignore[type-var]
    if getattr(changed, "policy", None) is None:
        return changed
    # A dataclass keeps the default of each field at the class.
    if idle := [x for x in OF_DEFAULT_POLICY if x in changes and changes[x] != getattr(kind, x)]:
        raise SettingError(
            f"{idle[0]} describes the default policy, in whose place another one is given; "
            f"write it there: policy=fl.Policy(..., {idle[0]}={changes[idle[0]]!r})"
        )
    return changed
