"""What every runtime promises. A new runtime gets all of it by one line in `RUNTIMES`."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import close, remembered, remembered_run, rows_and_weights, same, timeless
from environments import Faulty
from flowrl.core.items import COLUMNS

RUNTIMES = [
    "local",
    pytest.param("ray", marks=(pytest.mark.ray, pytest.mark.system)),
    "xla",
]
every_runtime = pytest.mark.parametrize("runtime", RUNTIMES, indirect=True)

SMALL = {"num_runners": 2, "envs_per_runner": 4, "rollout_length": 16}
PPO = fl.ppo("CartPole-v1", fl.PPOSettings(**SMALL, batch_size=256, epochs=2, minibatch_size=64))
STOCK = {
    "ppo": PPO,
    "a2c": fl.a2c("CartPole-v1", fl.A2CSettings(**SMALL, batch_size=128, report_every=3)),
    "a3c": fl.a3c("CartPole-v1", fl.A3CSettings(**{**SMALL, "num_runners": 1}, report_every=3)),
    "pg": fl.pg("Pendulum-v1", fl.PGSettings(**SMALL, batch_size=128)),
}


def on(runtime, graph=PPO):
    """The graph, with an environment that the runtime can have."""
    env = graph.resources["runners"].env
    return (
        graph.set("runners.env", f"gymnax:{env}") if isinstance(runtime, fl.XlaRuntime) else graph
    )


@every_runtime
def test_rows_have_every_column_and_their_totals_rise(runtime):
    rows, _ = remembered(on(runtime), 4, runtime)
    assert [r["row"] for r in rows] == [1, 2, 3, 4]
    for before, row in zip([None, *rows], rows, strict=False):
        assert tuple(row)[: len(COLUMNS)] == COLUMNS
        assert {"loss/policy", "loss/value", "entropy", "kl"} <= set(row)
        if before:
            assert all(
                row[k] > before[k]
                for k in ("env_steps", "trained_steps", "updates", "gradient_steps", "seconds")
            )
    assert rows[0]["lag_max"] == rows[-1]["lag_mean"] == 0


@pytest.mark.parametrize(
    ("name", "runtime"),
    [
        *((name, "local") for name in STOCK),
        pytest.param("ppo", "ray", marks=(pytest.mark.ray, pytest.mark.system)),
        ("ppo", "xla"),
        ("pg", "xla"),
    ],
    indirect=["runtime"],
)
def test_the_plan_equals_what_is_counted(runtime, name):
    run = remembered_run(on(runtime, STOCK[name]), 4, runtime)
    rows, plan, counted = run.rows, run.plan, run.counts()
    assert counted["sampled_steps"] == 4 * plan.per_row("sampled_steps")
    assert counted["requests"] == 4 * plan.per_row("requests")
    assert counted["publishes"] == 4 * plan.per_row("publishes")
    assert (
        counted["weight_bytes"]
        == 4 * plan.per_row("weight_bytes")
        == counted["publishes"] * _bytes(run.policy.weights)
    )
    assert rows[-1]["updates"] == 4 * plan.per_row("updates")
    assert rows[-1]["gradient_steps"] == 4 * plan.per_row("gradient_steps")
    assert rows[-1]["trained_steps"] == 4 * plan.per_row("trained_steps")
    assert rows[-1]["lag_max"] == plan.lag == 0
    invalid = 4 * plan.per_row("sampled_steps") - rows[-1]["env_steps"]
    assert 0 <= invalid <= rows[-1]["episodes"], (
        "only rows after an episode's end are no environment steps"
    )


def _bytes(weights):
    return sum(np.asarray(x).nbytes for part in weights for x in part.values())


@every_runtime
def test_the_same_seed_gives_the_same_run_and_another_seed_another(runtime):
    a, wa = remembered(on(runtime), 4, runtime)
    b, wb = rows_and_weights(on(runtime), 4, runtime)
    c, wc = rows_and_weights(on(runtime), 4, runtime, seed=6)
    assert timeless(a) == timeless(b)
    assert same(wa, wb)
    assert timeless(a) != timeless(c)
    assert not same(wa, wc)


@every_runtime
def test_every_runtime_gives_what_local_gives(runtime):
    rows, weights = remembered(on(runtime), 4, runtime)
    local, expected = remembered(on(runtime), 4)
    if isinstance(runtime, fl.XlaRuntime):  # what is one program is rounded otherwise
        close((timeless(rows), weights), (timeless(local), expected))
    else:
        assert timeless(rows) == timeless(local)
        assert same(weights, expected)


@every_runtime
def test_the_reports_rate_changes_nothing_that_is_learned(runtime):
    _, often = remembered(on(runtime), 4)
    rows, seldom = rows_and_weights(on(runtime).set("report.every", 2), 2, runtime)
    assert rows[-1]["updates"] == 4
    close(often, seldom, rtol=0, atol=1e-5 if isinstance(runtime, fl.XlaRuntime) else 0)


@every_runtime
def test_the_audit_closes(runtime):
    run = remembered_run(on(runtime), 4, runtime)
    audit = run.audit()
    assert audit.closed, str(audit)
    assert {(e.before, e.after) for e in audit.edges} == {
        (a, n.name) for n in PPO.nodes for a in n.after
    }
    first = next(e for e in audit.edges if e.before == "sample")
    assert first.put.steps == run.counts()["sampled_steps"]
    batch = next(e for e in audit.edges if e.before == "batch")
    assert first.put.steps == batch.put.steps + audit.held_steps.get("batch", 0)


@every_runtime
def test_evaluation_comes_with_the_next_row_only(runtime):
    graph = on(runtime).insert(after="sync", play=fl.Evaluate(every=2, episodes=3))
    rows, _ = rows_and_weights(graph, 4, runtime)
    assert ["eval/return_mean" in r for r in rows] == [False, True, False, True]
    assert rows[1]["eval/return_min"] <= rows[1]["eval/return_mean"] <= rows[1]["eval/return_max"]


FAULTS = {
    "raise": r"environment 0 of Faulty raised in step\(.*ZeroDivisionError: a joint broke",
    "raise in reset": r"environment 0 of Faulty raised in reset: OSError: the simulator is gone",
    "nan reward": (
        r"environment 0 of Faulty gave a reward that is not finite, at step 2 of the rollout"
    ),
    "shape": (
        r"environment 0 of Faulty returned an observation float32\[3\] from step, but its "
        r"observation_space declares float32\[2\]"
    ),
    "dtype": (
        r"environment 0 of Faulty returned an observation <U1\[2\] from step, but its "
        r"observation_space declares float32\[2\]"
    ),
}


@pytest.mark.parametrize(
    ("runtime", "how"),
    [
        *(("local", how) for how in FAULTS),
        *(
            pytest.param("ray", how, marks=(pytest.mark.ray, pytest.mark.system))
            for how in ("raise", "nan reward")
        ),
    ],
    indirect=["runtime"],
)
def test_a_fault_in_an_environment_ends_the_run_with_its_address_and_keeps_the_rows(
    runtime, how, tmp_path
):
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            num_runners=2,
            envs_per_runner=1,
            rollout_length=8,
            batch_size=16,
            epochs=1,
            minibatch_size=None,
        ),
    )
    policy = graph.resources["runners"].policy
    graph = graph.replace(
        runners=fl.Runners(
            Faulty,
            policy,
            num_runners=2,
            envs_per_runner=1,
            rollout_length=8,
            env_settings={"at": 16, "how": how},
        )
    )
    run = fl.run(graph, runtime=runtime, out=tmp_path / "run")
    with (
        pytest.raises(
            fl.errors.EnvError, match=r"ppo\.sample: runners, runner [01]: " + FAULTS[how]
        ),
        run,
    ):
        list(run)
    assert run.reason == "failed"
    assert len(run.rows) == len((tmp_path / "run/rows.jsonl").read_text().splitlines()) == 2
    fl.load(tmp_path / "run", allow=["environments"])


@every_runtime
def test_a_loss_of_nan_keeps_the_last_good_weights_stops_at_the_next_row_and_names_the_update(
    runtime,
):
    graph = on(runtime).insert(after="norm", poison=Poison(from_=3)).set("report.every", 2)
    with (
        pytest.raises(
            fl.errors.NotFiniteError,
            match=r"ppo\.learner: update 3, of row 2, gave a loss or weights that are not finite",
        ),
        fl.run(graph, runtime=runtime) as run,
    ):
        list(run)
    assert [r["updates"] for r in run.rows] == [2], "it stops at the next row"
    _, good = remembered(on(runtime), 2)
    close(good, run.policy.weights, rtol=0, atol=1e-5 if isinstance(runtime, fl.XlaRuntime) else 0)


@dataclass(frozen=True)
class Poison(fl.extend.Operator):
    """Makes the advantages NaN from a given batch on."""

    from_: int

    def init(self):
        return {"seen": 0}

    def step(self, state, batch, ctx):
        state["seen"] = min(state["seen"] + 1, self.from_)
        yield (
            batch.with_(advantage=ctx.run(_nan, batch["advantage"]))
            if state["seen"] == self.from_
            else batch
        )


def _nan(x):
    return x * jnp.nan


@every_runtime
def test_a_run_can_be_left_and_closed_at_any_time(runtime):
    run = fl.run(on(runtime), runtime=runtime)
    run.close()
    run.close()
    assert run.rows == []
    assert list(run) == []
    assert not math.isnan(float(np.sum(run.policy.act(np.zeros(4)))))
