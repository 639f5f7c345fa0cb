"""One axis of devices: arrays that are split over them, and sums over what each of them has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Array = Any
AXIS = "data"
"""The name of the axis."""


@cache
def devices(count: int | None = None) -> Mesh | AbstractMesh:
    """So many devices of this process along one axis, all of them by default.

    Where the process has fewer, the function that asks runs in another process, and here only its shapes are computed: the mesh is abstract.
    """
    count = count or jax.local_device_count()
    if count > jax.local_device_count():
        return AbstractMesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.make_mesh(
        (count,), (AXIS,), devices=jax.local_devices()[:count], axis_types=(AxisType.Auto,)
    )


def split(x: Any, axis: int) -> Any:
    """An array with an axis split over the devices, where their number divides it; within a program a constraint on one."""
    size = jax.local_device_count()
    if size == 1 or not isinstance(x, jax.Array | np.ndarray):
        return x
    fits = x.ndim > axis and x.shape[axis] % size == 0
    where = NamedSharding(
        devices(), PartitionSpec(*[None] * axis, AXIS) if fits else PartitionSpec()
    )
    return (
        jax.lax.with_sharding_constraint(x, where)
        if isinstance(x, jax.core.Tracer)
        else jax.device_put(x, where)
    )


def on_one(x: jax.Array) -> jax.Array:
    """An array that several devices hold whole, as it lies on the first of them; any other as it is."""
    if (
        isinstance(x, jax.core.Tracer)
        or len(x.sharding.device_set) == 1
        or not x.is_fully_replicated
    ):
        return x
    whole: jax.Array = x.addressable_shards[0].data
    return whole


def shared(fn: Callable[..., Any], count: int, given: Any, returned: Any) -> Callable[..., Any]:
    """A function that `count` devices run side by side, each on its part of the arrays.

    Args:
        fn: what each runs. It sees its own part, and adds up over all by `total`.
        count: of devices.
        given: a `jax.sharding.PartitionSpec` for each argument, or a tree of them: which axis is split.
        returned: the same for what it returns. What is not split must be equal on all devices.
    """
    return jax.shard_map(
        fn, mesh=devices(count), in_specs=given, out_specs=returned, check_vma=False
    )


def total(tree: Any) -> Any:
    """The sum of arrays over the devices that run this function side by side; the arrays themselves where one runs it alone."""
    return jax.lax.psum(tree, AXIS) if _side_by_side() else tree


def mean_of_devices(tree: Any, weight: Array) -> Any:
    """The means of arrays over the devices that run this function side by side, each weighed by its `weight`: the arrays where one runs it alone.

    Whole numbers, and random keys, are the same on all devices and stay as they are. Numbers of a weight of 0 may be NaN: they do not count.
    """
    if not _side_by_side():
        return tree
    leaves, form = jax.tree.flatten(tree)
    weight = weight.astype(jnp.float32)  # of one type all of them are added up by one message
    weighed = {
        i: jnp.where(weight > 0, x * weight, 0)
        for i, x in enumerate(leaves)
        if jnp.issubdtype(x.dtype, jnp.floating)
    }
    everything, weights = total((weighed, weight))
    means = {i: x / jnp.maximum(weights, 1) for i, x in everything.items()}
    return jax.tree.unflatten(form, [means.get(i, x) for i, x in enumerate(leaves)])


def number() -> Array:
    """The number of the device among those that run this function side by side; 0 where one runs it alone."""
    return jax.lax.axis_index(AXIS) if _side_by_side() else 0


def _side_by_side() -> bool:
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes
