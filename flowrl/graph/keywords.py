"""Whether a function or a class takes some settings as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flowrl.errors import SettingError, unknown

GIVEN = ("obs_space", "action_space", "rngs")
"""The usual names of what a module gets from flowrl."""


def check_keywords(fn: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise an error if a function or a class can't be called with these keyword arguments.

    Nothing is known of one without a signature, or with ``**settings`` of its own.

    Raises:
        SettingError: with the unknown name and the nearest one that there is.
    """
    # The metaclass of Flax's modules takes whatever `__init__` does.
    is_class = isinstance(fn, type)
    try:
        found = inspect.signature(fn.__init__ if is_class else fn)
    except (TypeError, ValueError):
        return
    parameters = list(found.parameters.values())[is_class:]
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return
    known = [x.name for x in parameters if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)]
    for name in names:
        if name not in known:
            shown = [x for x in known if x not in GIVEN]
            owner = getattr(fn, "__name__", repr(fn))
            raise SettingError(f"{owner}: {unknown('setting', name, shown)}")
