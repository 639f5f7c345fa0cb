"""Rows that a loop writes as one array: they come back bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import same, with_system
from flowrl.core import packed_scan as module
from flowrl.core.packed_scan import WIDEST, packed_scan, scan_rows
from flowrl.rollout import jax_core
from flowrl.rollout.jax_core import Core

COUNT, LENGTH = 3, 4
SHAPES = {"one": (), "few": (4,), "grid": (2, 3), "largest": (WIDEST,), "larger": (WIDEST + 1,)}
TYPES = ["float32", "int32", "uint32", "bool", "uint8", "float16"]
PACKED = TYPES[:4]


def any_bits(rng, shape, dtype):
    """Values with any bits at all, so NaN of all kinds among them."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    return np.frombuffer(rng.bytes(np.dtype(dtype).itemsize * np.prod(shape)), dtype).reshape(shape)


def step(carry, x):
    # Were they handed on as they came, the loop would leave them out.
    return carry + 1, {name: rows[::-1] for name, rows in x.items()}


def written(xs):
    """The arrays that each step of the loop writes."""
    jaxpr = jax.make_jaxpr(partial(packed_scan, step))(jnp.int32(0), xs).jaxpr
    (loop,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return len(loop.outvars) - 1


def bits(x):
    return np.asarray(x).tobytes(), x.dtype, x.shape


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_all_types_and_shapes_come_back_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    xs = {
        f"{name} {dtype}": any_bits(rng, (LENGTH, COUNT, *shape), dtype)
        for name, shape in SHAPES.items()
        for dtype in TYPES
    }
    carry, rows = jax.jit(partial(packed_scan, step))(jnp.int32(0), xs)
    assert carry == LENGTH
    assert rows.keys() == xs.keys()
    assert all(bits(rows[name]) == bits(x[:, ::-1]) for name, x in xs.items())


def test_a_step_writes_one_array_for_all_that_are_small():
    small = {name: jnp.zeros((LENGTH, COUNT, 2), name) for name in PACKED}
    small["largest"] = jnp.zeros((LENGTH, COUNT, WIDEST))
    assert written(small) == 1
    others = {name: jnp.zeros((LENGTH, COUNT, 2), name) for name in TYPES if name not in PACKED}
    large = {"large": jnp.zeros((LENGTH, COUNT, WIDEST + 1))}
    assert written({**small, **others, **large}) == 1 + len(others) + 1


@pytest.mark.parametrize(("backend", "packs"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_rows_are_packed_where_each_write_is_a_kernel(monkeypatch, backend, packs):
    monkeypatch.setattr(module.jax, "default_backend", lambda: backend)
    xs = {name: jnp.zeros((LENGTH, COUNT), name) for name in PACKED}
    jaxpr = str(jax.make_jaxpr(partial(scan_rows, step))(jnp.int32(0), xs))
    assert ("bitcast_convert_type" in jaxpr) == packs


@pytest.mark.parametrize(
    "name",
    with_system(
        ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"], {"Pendulum-v1", "Breakout-MinAtar"}
    ),
)
def test_a_rollout_is_the_same_packed(monkeypatch, name):
    graph = fl.ppo(f"gymnax:{name}", envs_per_runner=3, rollout_length=70)
    core = Core(graph.resources["runners"])
    weights = core.network.init(jax.random.key(1))
    work = core.start(jax.random.key(2))

    def rolled():
        # A function of its own each time, so that nothing compiled before serves it.
        return jax.jit(lambda *args: core.roll(*args, count=1))(work, weights)

    as_it_is = rolled()
    monkeypatch.setattr(jax_core, "scan_rows", packed_scan)
    assert same(as_it_is, rolled())
