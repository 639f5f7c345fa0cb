"""Every example runs, with few steps."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest

import flowrl as fl

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_example(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    # The networks that it learns with would take longer than all other examples.
    smaller = {"hidden": (8,)} if name == "crossq" else {}
    runs = importlib.import_module(name).main(steps=2_500, **smaller)
    for run in runs if isinstance(runs, list) else [runs]:
        assert run.reason == "steps"
        assert run.rows[-1]["env_steps"] >= 2_500
    assert "return" in capsys.readouterr().out
    del sys.modules[name]


def test_there_are_those_that_the_readme_names():
    assert {p.stem for p in EXAMPLES.glob("*.py")} >= {
        "ppo_cartpole",
        "vanilla_policy_gradient",
        "custom_operator",
        "custom_policy",
        "edit_a_stock_graph",
        "synchronous_impala",
        "recurrent_policy",
        "crossq",
    }


@pytest.fixture
def clip(monkeypatch):
    """The operator of its own example, as wide as it becomes after two batches of 8 steps."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("custom_operator").ClipRewards(end=1.0, steps=16)
    del sys.modules["custom_operator"]


@dataclass(frozen=True)
class Largest(fl.extend.Operator):
    """Notes the largest reward of each batch."""

    def init(self):
        return {"found": []}

    def step(self, state, batch, ctx):
        state["found"] = [*state["found"], ctx.run(jnp.max, batch["reward"])][-4:]
        yield batch


@pytest.mark.parametrize("runtime", ["local", "ray", "xla"], indirect=True)
def test_the_state_of_the_examples_operator_decides_what_it_clips(clip, runtime):
    settings = fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=4,
        batch_size=8,
        epochs=1,
        minibatch_size=None,
        policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
    )
    env = "gymnax:CartPole-v1" if isinstance(runtime, fl.XlaRuntime) else "CartPole-v1"
    graph = fl.ppo(env, settings).insert(after="sample", clip=clip, largest=Largest())
    with fl.run(graph, runtime=runtime) as run:
        for _ in range(4):
            next(run)
        (loop,) = run._session.turns.loops
        assert [float(x) for x in loop.states["largest"]["found"]] == [
            0.5,
            1.0,
            1.0,
            1.0,
        ]  # CartPole gives 1 a step
        assert float(loop.states["clip"]["steps"]) == 32
    assert run.audit().closed
