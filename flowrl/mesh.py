"""One axis of devices: what is split over them, and what all of them have."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@cache
def devices() -> Mesh:
    """All devices of this process, along one axis."""
    return jax.make_mesh((jax.local_device_count(),), ("data",), devices=jax.local_devices(), axis_types=(AxisType.Auto,))


def split(x: Any, axis: int) -> Any:
    """An array with an axis split over the devices, where their number divides it; within a program a constraint on one."""
    size = jax.local_device_count()
    if size == 1 or not isinstance(x, jax.Array | np.ndarray):
        return x
    fits = x.ndim > axis and x.shape[axis] % size == 0
    where = NamedSharding(devices(), PartitionSpec(*[None] * axis, "data") if fits else PartitionSpec())
    return jax.lax.with_sharding_constraint(x, where) if isinstance(x, jax.core.Tracer) else jax.device_put(x, where)
