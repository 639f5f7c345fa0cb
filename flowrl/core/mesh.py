"""One axis of devices: arrays that are split over them, and sums over their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Array = Any
AXIS = "data"
"""The name of the axis of devices."""


@cache
def devices(count: int | None = None) -> Mesh | AbstractMesh:
    """Return a mesh of devices along one axis: of this process, or of all processes of its group.

    Args:
        count: the number of devices; None for all.
    """
    size = count or jax.device_count()
    # Fewer devices than that: the function of the mesh runs in another process, and here only its
    # shapes are computed, for which an abstract mesh is enough.
    if size > jax.device_count():
        return AbstractMesh((size,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.make_mesh(
        (size,), (AXIS,), devices=jax.devices()[:size], axis_types=(AxisType.Auto,)
    )


def split(x: Any, axis: int) -> Any:
    """Return an array with an axis split over the devices, where their number divides it.

    Within a compiled function this is a constraint on the array. Values that are no arrays are
    returned as they are.
    """
    size = jax.device_count()
    if size == 1 or not isinstance(x, jax.Array | np.ndarray):
        return x
    fits = x.ndim > axis and x.shape[axis] % size == 0
    spec = PartitionSpec(*[None] * axis, AXIS) if fits else PartitionSpec()
    sharding = NamedSharding(devices(), spec)
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


def on_one(x: jax.Array) -> jax.Array:
    """Return the copy on the first device of an array that several devices hold whole.

    Any other array is returned as it is.
    """
    if (
        isinstance(x, jax.core.Tracer)
        or len(x.sharding.device_set) == 1
        or not x.is_fully_replicated
    ):
        return x
    copy: jax.Array = x.addressable_shards[0].data
    return copy


def on_all(x: jax.Array) -> jax.Array:
    """Return an array that each process of a group computed by itself as one of the whole group.

    What the group computed together is returned as it is.
    """
    if len(x.sharding.device_set) > 1:
        return x
    made: jax.Array = jax.make_array_from_single_device_arrays(x.shape, _everywhere(), [x])
    return made


def joined(x: np.ndarray[Any, Any], axis: int) -> jax.Array:
    """Return the array that the arrays of all processes of a group are, joined along an axis.

    Args:
        x: that of this process, whose devices split it evenly.
        axis: the axis.
    """
    sharding = NamedSharding(devices(), PartitionSpec(*[None] * axis, AXIS))
    made: jax.Array = jax.make_array_from_process_local_data(sharding, x)
    return made


def whole(x: Any) -> Any:
    """Return an array of a group of processes whole, which takes all of them, in the same order.

    What each of them has whole, and what is no array, is returned as it is.
    """
    if not isinstance(x, jax.Array) or x.is_fully_replicated:
        return x
    return _gathered()(x)


@cache
def _everywhere() -> NamedSharding:
    return NamedSharding(devices(), PartitionSpec())


@cache
def _gathered() -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=_everywhere())


def shared(fn: Callable[..., Any], count: int, given: Any, returned: Any) -> Callable[..., Any]:
    """Return a function that `count` devices run side by side, each on its part of the arrays.

    Args:
        fn: the function that each device runs. It sees its own part, and adds up over all by
            `total`.
        count: the number of devices.
        given: a `jax.sharding.PartitionSpec` for each argument, or a tree of them: which axis is
            split.
        returned: the same for the outputs. An output that is not split must be equal on all
            devices.
    """
    return jax.shard_map(
        fn, mesh=devices(count), in_specs=given, out_specs=returned, check_vma=False
    )


def total(tree: Any) -> Any:
    """Return the sums of arrays over the devices that run this function side by side.

    Where one device runs it alone, these are the arrays themselves.
    """
    if not _side_by_side():
        return tree
    if jax.process_count() == 1:
        return jax.lax.psum(tree, AXIS)
    # Between processes one message of all numbers takes a sixth of the time of one an array.
    flat, apart = ravel_pytree(tree)
    return apart(jax.lax.psum(flat, AXIS))


def mean_of_devices(tree: Any, weight: Array) -> Any:
    """Return the means of arrays over the devices that run this function side by side.

    Where one device runs it alone, these are the arrays themselves. Whole numbers, and random keys,
    are the same on all devices and stay as they are. Numbers of a weight of 0 may be NaN: they do
    not count.

    Args:
        tree: the arrays of this device.
        weight: a scalar, how much they count.
    """
    if not _side_by_side():
        return tree
    leaves, structure = jax.tree.flatten(tree)
    # Arrays of one type are added up by one message between the devices.
    weight_f32 = weight.astype(jnp.float32)
    weighted = {
        i: jnp.where(weight_f32 > 0, x * weight_f32, 0)
        for i, x in enumerate(leaves)
        if jnp.issubdtype(x.dtype, jnp.floating)
    }
    sums, weights = total((weighted, weight_f32))
    means = {i: x / jnp.maximum(weights, 1) for i, x in sums.items()}
    return jax.tree.unflatten(structure, [means.get(i, x) for i, x in enumerate(leaves)])


def number() -> Array:
    """Return the index of this device among those that run this function side by side.

    It is 0 where one device runs it alone.
    """
    return jax.lax.axis_index(AXIS) if _side_by_side() else 0


def _side_by_side() -> bool:
    """Return whether this code is traced within a function of `shared`."""
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes
