"""Any function as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.errors import SettingError
from flowrl.graph.protocols import Context, Stateless


@dataclass(frozen=True)
class Map(Stateless):
    """Yield ``fn(item)``.

    The function is called as it is; wrap heavy array maths in `jax.jit` yourself. When a graph is compiled it is called too: on
    JAX tracers or, where that fails, on zeros of the same shapes. If neither works, the plan says that it ends there.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _check(self.fn, "fn")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """One in, one out."""
        yield ctx.call(self.fn, item)


@dataclass(frozen=True)
class Filter(Stateless):
    """Pass on the items of which ``keep(item)`` is true.

    When a graph is compiled it is called on JAX tracers; where the answer depends on values, the plan says that it ends there.
    """

    keep: Callable[[Any], bool]

    def __post_init__(self) -> None:
        _check(self.keep, "keep")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """One in, one or none out."""
        if ctx.test(self.keep, item):
            yield item


@dataclass(frozen=True)
class FlatMap(Stateless):
    """Yield every item of ``fn(item)``. Compiled as `Map` is."""

    fn: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        _check(self.fn, "fn")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """One in, any number out."""
        yield from ctx.call(_Listed(self.fn), item)


def _check(fn: Any, name: str) -> None:
    if not callable(fn):
        raise SettingError(f"{name} must be a function, got {fn!r}")


@dataclass(frozen=True)
class _Listed:
    fn: Callable[[Any], Iterable[Any]]

    def __call__(self, item: Any) -> list[Any]:
        return list(self.fn(item))
