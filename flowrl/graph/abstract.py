"""The site of the abstract trace: functions and workers give shapes, and nothing is computed."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flowrl.core.compiled import jitted
from flowrl.core.items import Filling, lag_of, read_only
from flowrl.core.workers import HereWorkers
from flowrl.core.xla_threads import computing
from flowrl.errors import FlowrlError
from flowrl.graph.protocols import Handle, Workers
from flowrl.graph.site import HereSite, Place


class OpaqueError(FlowrlError):
    """Error of a user's function that works neither on shapes nor on zeros.

    What it returns is unknown before the run.
    """


class AbstractSite(HereSite):
    """Site that finds the shapes that functions and workers give, and computes nothing.

    Args:
        place: where the resources are opened.
        name: the resource.
        seed: the seed of the run.
    """

    def __init__(self, place: Place, name: str, seed: int) -> None:
        super().__init__(place, name, seed)
        self.shapes: dict[Any, Any] = {}
        """By function, settings and shapes of its arguments: the shapes that it returns."""
        # Lists of one number, which the sites of all resources of a place share.
        self.time_lookups = [0]
        """How often the time was asked for."""
        self.plan_lookups = [0]
        """How often a number of the plan was asked for."""

    def planned(self, resource: Any, counter: str) -> int:
        """Return what the trace before this one counted; 0 if there was none."""
        self.plan_lookups[0] += 1
        return super().planned(resource, counter)

    def seconds(self) -> float:
        """Return a time a year after the last one, so that whatever waits for time is due."""
        self.time_lookups[0] += 1
        return self.time_lookups[0] * 3e7

    @property
    def devices(self) -> int:
        """One, since the number of devices that share the work changes no shapes."""
        return 1

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Return the shapes that a function returns, found once per settings and shapes."""
        leaves, tree = jax.tree.flatten(args)
        # Types too, since 0, 0.0 and False are equal and mean different things to a function.
        types = (type(value) for value in static.values())
        slot = (fn, *static.items(), *types, tree, *map(abstract, leaves))
        if slot not in self.shapes:
            # JAX knows a function by the context in which it was traced. Most runs are small, and
            # have one thread: they need not trace it again.
            with computing(1):
                self.shapes[slot] = jitted(fn, donate, *static.items()).eval_shape(*args)
        return self.shapes[slot]

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return what a function of items returns, with shapes for arrays.

        The function is traced, or where that fails run once on zeros.

        Raises:
            OpaqueError: both fail, or what it returned on zeros holds a number that it was not
                given, or has other shapes than what it returns on ones.
            Exception: both fail in the same way, so it is the function itself, and not values.
        """
        if fn is lag_of and any(isinstance(x, jax.ShapeDtypeStruct | jax.Array) for x in args):
            # Every update calls it, and its shapes depend on shapes alone: they are found once.
            return self.run(fn, *args)
        try:
            return _traced(fn, *args)
        except BdbQuit:
            raise
        except Exception as untraceable:
            try:
                found = _of_values(fn, args, 0)
            except Exception as error:
                # A write to a read-only array is the function's own mistake, too.
                if type(error) is type(untraceable) or "read-only" in str(error):
                    raise
                raise OpaqueError(f"{type(untraceable).__name__}: {untraceable}") from untraceable
            # Numbers that were computed from zeros say nothing about the run, nor do items and
            # shapes that other values change.
            numbers = (bool, int, float, np.generic)
            if any(isinstance(x, numbers) for x in jax.tree.leaves(found)) or not _holds_for_ones(
                fn, args, found
            ):
                raise OpaqueError("what it returns depends on values") from untraceable
            return jax.tree.map(lambda x: x.leaf if isinstance(x, _Given) else x, found)

    def known(self, value: Any, planned: Any) -> Any:
        """Return what a plan takes the value for, which is not computed."""
        return planned

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Return whether a predicate holds, where static facts decide it.

        Raises:
            OpaqueError: values decide it.
            Exception: it fails on shapes and on zeros alike, so it is the function itself.
        """
        try:
            return bool(_traced(fn, *args))
        except BdbQuit:
            raise
        except Exception as untraceable:
            try:
                _of_values(fn, args, 0)
            except Exception as error:
                if type(error) is type(untraceable):
                    raise
            raise OpaqueError("it decides by values") from untraceable

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Call it at once if it is due.

        Raises:
            OpaqueError: what is due was computed, so that only the run knows it.
        """
        if isinstance(due, jax.ShapeDtypeStruct):
            raise OpaqueError("it decides by values when a verb is due")
        super().when(due, handle, call)

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Make shape-only stubs in the place of workers."""
        return HereWorkers(count, stub)


def _traced(fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of items returns.

    What it computed from shapes is returned as shapes, and everything else as it is.
    """
    leaves, tree = jax.tree.flatten(args)
    abstract_at = [i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)]
    returned: list[Any] = []
    structure: list[Any] = []

    def probe(*tracers: Any) -> list[Any]:
        full = list(leaves)
        for i, tracer in zip(abstract_at, tracers, strict=True):
            full[i] = tracer
        result, result_tree = jax.tree.flatten(fn(*jax.tree.unflatten(tree, full)))
        returned[:], structure[:] = result, [result_tree]
        return [x for x in result if isinstance(x, jax.core.Tracer)]

    # Only tracers leave the probe as shapes: what is static would become an array.
    shapes = iter(jax.eval_shape(probe, *(leaves[i] for i in abstract_at)))
    filled = [next(shapes) if isinstance(x, jax.core.Tracer) else x for x in returned]
    return jax.tree.unflatten(structure[0], filled)


@dataclass(frozen=True, eq=False)
class _Given:
    """A leaf that a function was given and returned as it is; it is no number of its own."""

    leaf: Any


def _of_values(fn: Callable[..., Any], args: Any, value: int) -> Any:
    """Return what a function gives if all arrays are full of a value, with shapes for arrays."""

    def full(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return read_only(np.full(leaf.shape, value, leaf.dtype))
        return leaf

    def seen(leaf: Any) -> Any:
        if id(leaf) in given:
            return _Given(leaf)
        if isinstance(leaf, jax.Array | np.ndarray):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    given = {id(x) for x in jax.tree.leaves(args)}
    with np.errstate(all="ignore"):
        return jax.tree.map(seen, fn(*jax.tree.map(full, args)))


def _holds_for_ones(fn: Callable[..., Any], args: Any, found: Any) -> bool:
    """Return whether a function returns the same items and shapes on ones as on zeros."""
    try:
        other = _of_values(fn, args, 1)
    except BdbQuit:
        raise
    except Exception:  # noqa: BLE001 - any error means that values decide
        return False
    # By text: a static part of an item that each call makes may compare by identity.
    if repr(jax.tree.structure(other)) != repr(jax.tree.structure(found)):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True)
    return all(a.leaf is b.leaf if isinstance(a, _Given) else a == b for a, b in pairs)


def abstract(leaf: Any) -> Any:
    """Return what is static about a leaf of a state.

    This is an array's shape and type; of a `Filling` its mark and whether that is reached; of an
    object that compares by identity the text of its contents. It is any other value itself with its
    type, or its text if it can't be hashed.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, Filling):
        return (Filling, leaf.mark, leaf >= leaf.mark)
    # An object that compares by identity still equals itself when it was changed in place, and a
    # default repr shows only an address. So the contents of both are compared. Functions have
    # neither contents that change nor the default repr: they are compared as they are.
    compares: Any = type(leaf).__eq__
    by_identity = compares is object.__eq__ and not callable(leaf)
    if by_identity or repr(leaf) == object.__repr__(leaf):
        return (type(leaf), repr(leaf.__getstate__()))
    try:
        hash(leaf)
    except TypeError:
        return (type(leaf), repr(leaf))
    # The type too: 0, 0.0 and False are equal.
    return (type(leaf), leaf)
