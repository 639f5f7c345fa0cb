"""Guard against runs that start while a user's code is only being imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flowrl.errors import GraphError

_importing: list[str] = []


@contextmanager
def importing(who: str) -> Iterator[None]:
    """Let no run start in this context, in which user's code is imported for `who`.

    Without that, a script without a main guard would train again.
    """
    _importing.append(who)
    try:
        yield
    finally:
        _importing.pop()


def forbid_while_importing() -> None:
    """Refuse to start a run where one is only being imported.

    Raises:
        GraphError: user's code is being imported; the error has the way out.
    """
    if _importing:
        raise GraphError(
            f"a run starts while {_importing[-1]} imports this script; "
            "put what starts it under `if __name__ == '__main__':`"
        )
