"""Numbers among settings are arguments of what is compiled: another value compiles nothing."""

import argparse
import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import forget_compiled
from flowrl.cli.options import count
from flowrl.core import compiled
from flowrl.core.arguments import Argument, Values, substituted, with_arguments
from flowrl.core.xla_threads import clients

SMALL = fl.Policy(fl.networks.MLP, hidden=(8,))


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    off: float = 0.0
    count: int = 3
    most: float = float("inf")
    on: bool = True


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    share: float | None = None
    name: str = "x"

    def scaled(self, x, *, by):
        return x * self.inner.rate * by + self.inner.count

    @classmethod
    def made(cls, x, *, by):
        return x * by * isinstance(cls, type)


def test_numbers_become_arguments_and_nothing_else_does():
    found = {}
    general = with_arguments(Outer(share=2.5), "self", found)
    assert found == {"self.inner.rate": 0.5, "self.share": 2.5}
    assert general == with_arguments(Outer(Inner(0.7), share=1.5), "self", {})
    assert hash(general) == hash(with_arguments(Outer(Inner(0.7), share=1.5), "self", {}))
    for other in (Outer(Inner(count=4), 2.5), Outer(Inner(off=1.0), 2.5), Outer(share=None)):
        assert general != with_arguments(other, "self", {})
    # An argument is the number that it holds, but for comparisons.
    assert general.inner.rate * 2 == 1.0 and general.inner.rate != 0.5
    back = substituted(general, Values({"self.inner.rate": 0.9, "self.share": 3.0}))
    assert back == Outer(Inner(0.9), share=3.0)
    plain = Outer(Inner(0.0))
    assert with_arguments(plain, "self", {}) is plain
    assert not isinstance(plain.inner.rate, Argument)


def test_one_compiled_function_serves_every_value():
    before = compiled.with_numbers.cache_info().misses
    results = []
    for rate in (0.5, 0.25):
        for by in (2.0, 4.0):
            run = compiled.jitted(Outer(Inner(rate)).scaled, (), ("by", by))
            results.append(float(run(np.float32(8))))
    assert results == [11.0, 19.0, 7.0, 11.0]
    assert compiled.with_numbers.cache_info().misses - before == 1


def fails_while_it_runs(x, *, by):
    def fail(_):
        raise RuntimeError("the fault of the function")

    return x * by + jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x[0])


@pytest.mark.parametrize("copied", [0, compiled.COPIED_BYTES])
def test_what_fails_while_it_runs_raises_its_own_error_also_where_nothing_was_copied(
    copied, monkeypatch
):
    monkeypatch.setattr(compiled, "COPIED_BYTES", copied)
    run = compiled.jitted(fails_while_it_runs, (0,), ("by", 0.5 + copied))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="the fault of the function"):
            run(jnp.ones(8))


def test_numbers_take_on_the_type_of_what_they_meet():
    half = compiled.jitted(scaled, (), ("by", 0.5))
    assert half(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    assert half(jnp.arange(2)).dtype == jnp.float32


def scaled(x, *, by):
    return x * by


def branches(x, *, by):
    return x + 1 if by > 0.3 else x - 1


def reads(x, *, by):
    return x * np.log(by) * round(by, 1) * float(by)


@pytest.mark.parametrize("fn", [branches, reads])
def test_what_python_decides_by_a_number_is_compiled_for_that_number(fn):
    for by in (0.25, 0.5, 0.75):
        run = compiled.jitted(fn, (), ("by", by))
        assert run.eval_shape(jnp.float32(1)).dtype == jnp.float32
        np.testing.assert_allclose(run(jnp.float32(1)), fn(1.0, by=by), rtol=1e-6)
        np.testing.assert_allclose(run(jnp.float32(3)), fn(3.0, by=by), rtol=1e-6)


@dataclass
class Loose:
    """One that can't be hashed."""

    rate: float = 0.5

    def scaled(self, x):
        return x * self.rate


def test_methods_of_what_can_not_be_hashed_and_functions_of_python_itself_run_too():
    assert compiled.jitted(Loose().scaled, ())(jnp.float32(3)) == 1.5
    assert compiled.jitted(abs, ())(jnp.float32(-3)) == 3
    assert compiled.jitted(Outer.made, (), ("by", 0.5))(jnp.float32(3)) == 1.5


def fails(x, *, by):
    raise ValueError(f"not with {by}")


def test_a_functions_own_mistake_is_raised_with_the_number():
    with pytest.raises(ValueError, match=r"^not with 0.5"):
        compiled.jitted(fails, (), ("by", 0.5))(1.0)


def test_donated_arguments_are_reused_but_by_the_first_call_which_may_fail():
    forget_compiled()
    run, arrays = compiled.jitted(scaled, (0,), ("by", 0.5)), [jnp.ones(1000) for _ in range(2)]
    for x in arrays:
        run(x)
    assert [x.is_deleted() for x in arrays] == [False, True]


def sleeps(x, *, by):
    def of_python(y):
        return np.float32(y * round(by, 1))

    return jax.pure_callback(of_python, jax.ShapeDtypeStruct((), np.float32), x)


def test_what_python_computes_with_a_number_while_it_runs_is_compiled_for_that_number():
    for by in (0.5, 0.3):
        assert compiled.jitted(sleeps, (0,), ("by", by))(jnp.float32(2)) == np.float32(2 * by)


CHANGES = {
    "ppo": {
        "learner.optimizer.lr": 1e-3,
        "learner.optimizer.max_grad_norm": 0.7,
        "learner.loss.clip_ratio": 0.1,
        "learner.loss.ent_coef": 0.02,
        "adv.gamma": 0.9,
    },
    "dqn": {
        "learner.optimizer.lr": 1e-3,
        "runners.explore.end": 0.2,
        "runners.explore.start": 0.9,
        "replay.gamma": 0.9,
        "learner.loss.huber": 2.0,
    },
}


def small(name):
    if name == "ppo":
        return fl.ppo("CartPole-v1", ent_coef=0.01)
    return fl.dqn("CartPole-v1", learning_starts=100)


@pytest.mark.parametrize("name", CHANGES)
def test_other_numbers_in_a_stock_graph_compile_nothing(name, compilations):
    graph = small(name)
    for path, value in CHANGES[name].items():
        graph = graph.set(path, value)
    rows = []
    for flow in (small(name), graph):
        compilations.clear()
        with fl.run(flow) as run:
            rows.append([next(run) for _ in range(2)][-1])
    assert compilations == []
    # The values do reach the maths.
    assert rows[0]["loss"] != rows[1]["loss"]


def test_what_is_compiled_for_a_number_does_what_it_does_alone(compilations):
    """The whole path: settings after others give the rows that they give in a fresh process."""
    changed = small("ppo").set("learner.optimizer.lr", 1e-3).set("learner.loss.clip_ratio", 0.1)

    def losses(graph):
        with fl.run(graph) as run:
            return [next(run)["loss"] for _ in range(3)]

    after_another = (losses(small("ppo")), losses(changed))[1]
    forget_compiled()
    jax.clear_caches()
    assert losses(changed) == after_another


@pytest.mark.system
def test_other_learning_rates_need_no_memory():
    def one(lr):
        with fl.run(fl.pg("CartPole-v1", policy=SMALL).set("learner.optimizer.lr", lr)) as run:
            next(run)
        gc.collect()
        return sum(len(client.live_executables()) for client in clients())

    one(1e-3)
    before = one(2e-3)
    assert one(3e-3) == one(4e-3) == before


@pytest.mark.parametrize(
    ("text", "number"), [("1e6", 1_000_000), ("10_000", 10_000), ("1,000,000", 1_000_000)]
)
def test_whole_numbers_are_read_as_they_are_written(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["1,5e3", "1,5", "0,5e1", "1,00", "0", "2.5"])
def test_a_comma_that_may_be_a_point_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number of at least 1"):
        count(text)
