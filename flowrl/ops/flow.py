"""Operators that move items: any function as one, gates and joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from flowrl.core.items import Batch, Filling, steps_of
from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.protocols import Context, Operator, Stateless


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


@dataclass(frozen=True)
class Gate(Operator):
    """Let nothing through until so many steps came; from then on all.

    Args:
        start: steps (T x B) that end here.
    """

    start: int

    def __post_init__(self) -> None:
        if self.start < 1:
            raise SettingError(f"start must be at least 1, got {self.start}")

    def init(self) -> dict[str, int]:
        """The steps that came, as far as they matter."""
        return {"steps": Filling(0, self.start)}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """One in, one or none out."""
        if held["steps"] >= self.start:
            yield item
        elif (steps := steps_of(item)) or isinstance(item, Batch):
            held["steps"] = Filling(min(self.start, held["steps"] + steps), self.start)
        else:
            raise ContractError(
                f"counts steps, which {a(item)} has none of; put it where batches or updates flow"
            )


@dataclass(frozen=True)
class Merge(Operator):
    """Make one stream of several: each item as it comes, or so many of each node's in turn.

    By weights, ``Merge({"draw": 3, "demo": 1})``, the order is fixed, and spread as evenly as can be: draw draw demo draw. What comes before
    its turn waits here, and once a node has given as many as its weight what its items come of waits, too.

    Args:
        weights: by node, how many in each turn of all; None for whatever comes.

    Raises:
        ContractError: an item comes from a node that has no weight.
    """

    weights: Mapping[str, int] | None = None

    joins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weights is not None and (
            not self.weights or any(not isinstance(n, int) or n < 1 for n in self.weights.values())
        ):
            raise SettingError(
                f"weights must be whole numbers from 1 on by node, or None, got {self.weights!r}"
            )

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Whose turn it is, one after another: of those whose share is most behind, the first."""
        weights = dict(self.weights or {})
        total, credit, order = sum(weights.values()), dict.fromkeys(weights, 0), []
        for _ in range(total):
            credit = {name: credit[name] + weight for name, weight in weights.items()}
            name = max(credit, key=credit.__getitem__)
            credit[name] -= total
            order.append(name)
        return tuple(order)

    def init(self) -> dict[str, Any]:
        """By node what waits, and whose turn it is."""
        return {"waiting": {name: [] for name in self.weights or {}}, "turn": 0}

    def has_capacity(self, held: dict[str, Any], ctx: Context) -> bool:
        """Whether a node has given less than its weight that waits."""
        return self.weights is None or len(held["waiting"].get(ctx.source, ())) < self.weights.get(
            str(ctx.source), 1
        )

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """One in, any number out."""
        if self.weights is None:
            yield item
            return
        if ctx.source not in held["waiting"]:
            raise ContractError(
                f"an item comes from {ctx.source}, which has no weight; weights are for {', '.join(self.weights)}"
            )
        held["waiting"][ctx.source].append(item)
        while waiting := held["waiting"][self.order[held["turn"]]]:
            item, held["turn"] = waiting.pop(0), (held["turn"] + 1) % len(self.order)
            yield item


def _check(fn: Any, name: str) -> None:
    if not callable(fn):
        raise SettingError(f"{name} must be a function, got {fn!r}")


@dataclass(frozen=True)
class _Listed:
    fn: Callable[[Any], Iterable[Any]]

    def __call__(self, item: Any) -> list[Any]:
        return list(self.fn(item))
