"""The annotations of classes: Python evaluates their text with every question."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_type_hints


# As many classes as a session has, and not those of every notebook cell for ever.
@lru_cache(maxsize=1024)
def hints_of(kind: type, *, extras: bool = False) -> Mapping[str, Any]:
    """Return the types of a class's fields, those that it inherits included.

    Args:
        kind: the class.
        extras: whether ``Annotated[X, ...]`` stays what it is, and does not become ``X``.

    Raises:
        NameError: an annotation names what there is not at run time; nothing is remembered then.
    """
    return get_type_hints(kind, include_extras=extras)
