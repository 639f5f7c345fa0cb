"""Every example runs, with few steps."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flowrl as fl

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_edits_of_the_tutorial_lead_to_the_stock_graph(capsys):
    text = (EXAMPLES.parent / "docs/tutorials/ppo_to_impala.md").read_text(encoding="utf-8")
    cells = re.findall(r"```\{code-cell\} python\n(.*?)```", text, re.DOTALL)
    last = next(i for i, cell in enumerate(cells) if "the stock graph" in cell)
    exec("\n".join(cells[: last + 1]), {})
    assert "the stock graph: True" in capsys.readouterr().out


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_example(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    # The networks that these learn with would take longer than all other examples.
    smaller = {"hidden": (8,)} if name in ("crossq", "offline_to_online") else {}
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


@pytest.fixture
def alphazero(monkeypatch):
    """The example."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("alphazero")
    del sys.modules["alphazero"]


@pytest.mark.parametrize(
    ("board", "move"),
    [
        # 1 is a field of the player to move, -1 one of the other.
        ([[1, 1, 0], [-1, -1, 0], [0, 0, 0]], 2),
        ([[1, 0, -1], [-1, 1, 0], [0, -1, 0]], 8),
        ([[-1, -1, 0], [0, 1, 0], [0, 0, 0]], 2),
        ([[1, 0, 0], [-1, -1, 0], [1, 0, 0]], 5),
    ],
)
def test_a_search_finds_the_move_that_wins_or_does_not_lose_before_anything_is_learned(
    alphazero, board, move
):
    board = np.array([board, np.zeros((3, 3))], np.float32).reshape(2, 9)
    shares = np.asarray(alphazero.Searching(None, None, rngs=nnx.Rngs(0)).search(board))
    assert shares[0].argmax() == move
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    assert (shares[board != 0] == 0).all() and (shares[1] > 0).all()


def test_what_is_good_for_a_player_is_bad_for_the_one_before(alphazero):
    results = []

    def policy(params, boards, method):
        if method == "search":
            return jnp.full((len(boards), 9), 1 / 9)
        value = jnp.where(boards[:, 0] == 7, 0.5, 0.25)
        results.append(value)
        return jnp.zeros((len(boards), 9)), value

    column = {
        "obs": np.zeros((5, 1, 9)),
        "reward": np.array([[0], [0], [1], [0], [0]], np.float32),
        "terminated": np.array([[False], [False], [True], [False], [False]]),
        # The row after the end is the reset.
        "valid": np.array([[True], [True], [True], [False], [True]]),
        "bootstrap_obs": np.full((1, 9), 7.0),
    }
    loss, metrics = alphazero.AlphaZeroLoss()(policy, {}, column)
    # 1, -1 and 1 before the end, and after the reset -0.5, by the value of the next board.
    wanted = np.mean((0.25 - np.array([1, -1, 1, -0.5])) ** 2)
    np.testing.assert_allclose(metrics["loss/values"], wanted)
    np.testing.assert_allclose(metrics["loss/moves"], np.log(9), rtol=1e-6)
    assert loss == metrics["loss/values"] + metrics["loss/moves"] and len(results) == 2
