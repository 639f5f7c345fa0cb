"""The site of the abstract trace: functions and workers give shapes, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from flowrl.core.compiled import jitted
from flowrl.core.items import Filling, read_only
from flowrl.core.workers import HereWorkers
from flowrl.errors import FlowrlError
from flowrl.graph.protocols import Workers
from flowrl.graph.site import HereSite, Place


class Opaque(FlowrlError):
    """A user's function that works neither on shapes nor on zeros: what it returns is unknown before the run."""


class AbstractSite(HereSite):
    """Finds the shapes that functions and workers give, and computes nothing."""

    def __init__(self, place: Place, name: str, seed: int) -> None:
        super().__init__(place, name, seed)
        self.shapes: dict[Any, Any] = {}
        self.looks = [0]
        self.asked = [0]

    def planned(self, resource: Any, counter: str) -> int:
        """What the trace before this one found, if there was one."""
        self.asked[0] += 1
        return super().planned(resource, counter)

    def seconds(self) -> float:
        """Every look is a year after the last, so whatever waits for time is due."""
        self.looks[0] += 1
        return self.looks[0] * 3e7

    @property
    def devices(self) -> int:
        """One: how many share the work changes no shapes."""
        return 1

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """The shapes that the function returns; found once per function, settings and shapes."""
        leaves, tree = jax.tree.flatten(args)
        slot = (fn, *static.items(), tree, *map(abstract, leaves))
        if slot not in self.shapes:
            self.shapes[slot] = jitted(fn, donate, *static.items()).eval_shape(*args)
        return self.shapes[slot]

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """What the function returns, arrays as shapes: traced, or where that fails run once on zeros.

        Raises:
            Opaque: both fail, or what it gave on zeros is a number that depends on them.
            Exception: both fail in the same way, so it is the function itself, and not values.
        """
        try:
            return _traced(fn, *args)
        except Exception as untraceable:
            try:
                with np.errstate(all="ignore"):
                    result = fn(*jax.tree.map(_zeros, args))
            except Exception as error:
                if type(error) is type(untraceable) or "read-only" in str(error):
                    raise
                raise Opaque(f"{type(untraceable).__name__}: {untraceable}") from untraceable
            known = {id(x) for x in jax.tree.leaves(args)}
            if any(
                isinstance(x, bool | int | float | np.generic) and id(x) not in known
                for x in jax.tree.leaves(result)
            ):
                raise Opaque("what it returns depends on values") from untraceable
            return jax.tree.map(lambda x: x if id(x) in known else _shape_of(x), result)

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Whether a predicate holds, where static facts decide it.

        Raises:
            Opaque: values do.
        """
        try:
            return bool(_traced(fn, *args))
        except Exception as untraceable:
            raise Opaque("it decides by values") from untraceable

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Twins in the place of workers."""
        return HereWorkers(count, stub)


def _traced(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function of items returns: shapes for what it computed from shapes, and everything else as it is."""
    leaves, tree = jax.tree.flatten(args)
    at = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    known: list[Any] = []

    def probe(*tracers: Any) -> list[Any]:
        full = list(leaves)
        for i, tracer in zip(at, tracers, strict=True):
            full[i] = tracer
        result, form = jax.tree.flatten(fn(*jax.tree.unflatten(tree, full)))
        known[:] = [form, result]
        return [x for x in result if isinstance(x, jax.core.Tracer)]

    shapes = iter(jax.eval_shape(probe, *(leaves[i] for i in at)))
    return jax.tree.unflatten(
        known[0], [next(shapes) if isinstance(x, jax.core.Tracer) else x for x in known[1]]
    )


def _zeros(leaf: Any) -> Any:
    return (
        read_only(np.zeros(leaf.shape, leaf.dtype))
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf
    )


def _shape_of(leaf: Any) -> Any:
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if isinstance(leaf, jax.Array | np.ndarray)
        else leaf
    )


def abstract(leaf: Any) -> Any:
    """What is static about a leaf: an array's shape and type, and any other value itself; of what can't be hashed, its text."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), str(leaf.dtype))
    if isinstance(leaf, Filling):
        return (Filling, leaf.mark, leaf >= leaf.mark)
    if repr(leaf) == object.__repr__(leaf):  # equal to itself, whatever it holds by now
        return (type(leaf), repr(leaf.__getstate__()))
    return leaf if isinstance(leaf, Hashable) else (type(leaf), repr(leaf))
