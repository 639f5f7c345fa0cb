"""How many threads XLA computes with: by the size of the work, and within the run alone."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import flowrl as fl
from conftest import same
from flowrl.core.machine import usable_cores
from flowrl.core.xla_threads import LARGE, _device, computing

WIDE = fl.Policy(fl.networks.MLP, hidden=(512, 512))
MIDDLE = fl.Policy(fl.networks.MLP, hidden=(256, 256))
SMALL = {"envs_per_runner": 4, "rollout_length": 16, "batch_size": 64, "epochs": 1}
find_device = _device.__wrapped__
"""The function without its memory, since tests change what it reads."""
own_client = pytest.mark.skipif(
    jax.device_count() > 1 or usable_cores() == 1 or "NPROC" in os.environ,
    reason="the number of threads is not flowrl's to choose here",
)


def device_in(context):
    with context:
        return next(iter(jnp.ones(2).devices()))


@own_client
def test_functions_run_on_a_client_of_its_own_within_the_context_alone():
    usual = jax.devices()[0]
    assert device_in(computing(1)) is device_in(computing(1)) is not usual
    assert device_in(computing(None)) is device_in(computing(usable_cores())) is usual
    assert device_in(computing(1)).client is not usual.client
    seen = []
    with computing(1):
        thread = threading.Thread(target=lambda: seen.append(device_in(computing(None))))
        thread.start()
        thread.join()
    assert seen == [usual], "another thread is left as it was"


def long_work(x):
    return jax.lax.fori_loop(0, 3000, lambda _, y: jnp.sin(y @ y), x)


@own_client
def test_a_function_is_computed_once_its_call_returns():
    # It is computed in the thread that calls, which would wait for another one to take it up.
    with computing(1):
        assert jax.jit(long_work)(jnp.ones((64, 64))).is_ready()
    with computing(1, ahead=True):
        result = jax.jit(long_work)(jnp.ones((64, 64)))
        assert not result.is_ready(), "this thread has gone on before it was computed"
        result.block_until_ready()


@pytest.mark.parametrize(("every", "ahead"), [(1, False), (4, True)])
def test_a_run_goes_on_while_it_computes_where_most_updates_are_not_waited_for(every, ahead):
    graph = fl.dqn("CartPole-v1", learning_starts=64, batch_size=32, report_every=4)
    plan = graph.set("sync.every", every).compile()
    assert plan.ahead is ahead
    with fl.run(plan) as run:
        next(run)
        assert run._session.place.ahead is ahead


@pytest.mark.parametrize(
    ("graph", "small"),
    [
        (fl.ppo("CartPole-v1", minibatch_size=64, **SMALL), True),
        (fl.ppo("CartPole-v1", minibatch_size=64, policy=WIDE, **SMALL), False),
    ],
)
def test_a_plan_says_whether_updates_are_small(graph, small):
    plan = graph.compile()
    assert plan.small == small == (plan.operations < LARGE)
    assert str(plan).splitlines()[-1].endswith("one thread" if small else "a thread a core")


@pytest.mark.parametrize(
    ("graph", "threads"),
    [
        (fl.ppo("CartPole-v1", minibatch_size=64, **SMALL), 1),
        (fl.ppo("CartPole-v1", minibatch_size=64, policy=MIDDLE, **SMALL), None),
        (fl.ppo("gymnax:CartPole-v1", minibatch_size=64, **SMALL), None),
    ],
    ids=["small", "large for a GPU alone", "an environment in JAX"],
)
def test_where_there_is_a_gpu_it_takes_all_but_small_updates(with_gpu, graph, threads):
    plan = graph.compile()
    assert plan.small and plan.threads == threads
    assert str(plan).splitlines()[-1].endswith("one thread" if threads else "on the GPU")


@pytest.mark.parametrize("threads", [1, usable_cores()])
def test_a_number_of_threads_is_one_of_the_cpu_where_there_is_a_gpu(with_gpu, threads):
    found = find_device(threads, False)
    assert found.platform == "cpu"
    assert (found is jax.local_devices(backend="cpu")[0]) == (threads == usable_cores() > 1)


def test_a_platform_that_the_user_chose_stays(with_gpu):
    jax.config.update("jax_platforms", "cuda,cpu")
    assert find_device(1, False) is None


def test_operations_are_six_for_each_parameter_and_row():
    plan = fl.ppo("CartPole-v1", minibatch_size=32, **SMALL).compile()
    with fl.run(plan, steps=64) as run:
        parameters = sum(x.size for x in run.policy.weights.params.values())
    assert plan.operations == 6 * 32 * parameters


class Where(fl.extend.Stateless):
    """Notes on which device functions of the stage are computed."""

    def step(self, held, batch, ctx):
        x = ctx.run(jnp.negative, batch["reward"])
        # While a graph is checked there are shapes alone.
        if isinstance(x, jax.Array):
            SEEN.append(next(iter(x.devices())))
        yield batch


SEEN = []


@own_client
@pytest.mark.parametrize("threads", [None, 1, usable_cores()])
def test_a_run_computes_with_its_threads_and_gives_the_same(threads):
    SEEN.clear()
    graph = fl.ppo("CartPole-v1", minibatch_size=32, **SMALL).insert(after="sample", where=Where())
    with fl.run(graph, runtime=fl.LocalRuntime(threads=threads), steps=256) as run:
        list(run)
    usual = jax.devices()[0]
    assert all((device is usual) == (threads == usable_cores()) for device in SEEN) and SEEN
    assert device_in(computing(None)) is usual, "what comes after the run is as it was"
    if threads is None:
        with fl.run(graph, runtime=fl.LocalRuntime(threads=1), steps=256) as again:
            list(again)
        assert same(again.policy.weights, run.policy.weights)


def test_the_users_own_number_stays():
    code = "import jax; from flowrl.core.xla_threads import _device; print(_device(1, False))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NPROC": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "None"


@pytest.mark.parametrize("kind", [fl.LocalRuntime, fl.XlaRuntime, fl.RayRuntime])
def test_a_number_of_threads_is_checked(kind):
    with pytest.raises(fl.errors.SettingError, match="threads must be a whole number, at least 1"):
        kind(threads=0)
