"""Whether a function or a class takes some settings as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flowrl.errors import SettingError, unknown

GIVEN = ("obs_space", "action_space", "rngs")
"""The usual names of what a module gets from flowrl."""


def completed(fn: Callable[..., Any], *several: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return settings of a function with its defaults for what only others of them have.

    >>> completed(open, {"mode": "r"}, {})
    [{'mode': 'r'}, {'mode': 'r'}]
    """
    names = {name for settings in several for name in settings}
    if all(len(settings) == len(names) for settings in several):
        return [dict(settings) for settings in several]
    try:
        found = _signature(fn).parameters
    except (TypeError, ValueError):
        return [dict(settings) for settings in several]
    defaults = {x: found[x].default for x in names if x in found}
    known = {name: x for name, x in defaults.items() if x is not inspect.Parameter.empty}
    return [{**known, **settings} for settings in several]


def check_keywords(fn: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise an error if a function or a class can't be called with these keyword arguments.

    Nothing is known of one without a signature, or with ``**settings`` of its own.

    Raises:
        SettingError: with the unknown name and the nearest one that there is.
    """
    try:
        found = _signature(fn)
    except (TypeError, ValueError):
        return
    parameters = list(found.parameters.values())[isinstance(fn, type) :]
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        return
    known = [x.name for x in parameters if x.kind in (x.KEYWORD_ONLY, x.POSITIONAL_OR_KEYWORD)]
    for name in names:
        if name not in known:
            shown = [x for x in known if x not in GIVEN]
            owner = getattr(fn, "__name__", repr(fn))
            raise SettingError(f"{owner}: {unknown('setting', name, shown)}")


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """Return what a function takes, or the `__init__` of a class, ``self`` included.

    The metaclass of Flax's modules takes whatever `__init__` does.

    Raises:
        TypeError, ValueError: nothing is known of it.
    """
    is_class = isinstance(fn, type)
    return inspect.signature(fn.__init__ if is_class else fn)
