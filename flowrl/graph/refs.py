"""`refs`: the fields by which operators and resources refer to resources."""

from __future__ import annotations

from types import UnionType
from typing import Any, Union, get_args, get_origin

from flowrl.core.hints import hints_of
from flowrl.errors import ContractError
from flowrl.graph.protocols import Handle, RefTo


def refs(operator: Any) -> dict[str, tuple[str, type[Handle]]]:
    """Return the `Ref` fields of an operator or a resource.

    Returns:
        By name of the field: the name of the resource, and the kind of its handle.
    """
    found: dict[str, tuple[Any, type[Handle]]] = {}
    kind: Any = type(operator)
    try:
        hints = hints_of(kind, extras=True)
    except NameError as error:
        raise ContractError(
            f"the annotations of {kind.__name__} can't be read: {error}; import that "
            "name at run time, not under `if TYPE_CHECKING`"
        ) from None
    for field, hint in hints.items():
        value = getattr(operator, field, None)
        # `Ref[X] | None` is a reference unless it is None.
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for option in options if value is not None or len(options) == 1 else ():
            for mark in getattr(option, "__metadata__", ()):
                if isinstance(mark, RefTo):
                    found[field] = (value, mark.kind)
    return found


def resource_and_part(target: str) -> tuple[str, str]:
    """Return the resource that a reference names, and the part of it; "" for the whole.

    >>> resource_and_part("runners.red")
    ('runners', 'red')
    """
    name, _, part = target.partition(".")
    return name, part
