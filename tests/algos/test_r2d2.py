"""R2D2 from environments that a policy has to remember to its saved policy; and what is wrong."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import RAY, close, rows_and_weights, same, timeless

LENGTH = 4


class Cue(gym.Env):
    """The first observation shows a cue; at the last step the action that it names is right."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.float32([2 * self.cue - 1, 0]), {}

    def step(self, action):
        self.time += 1
        over = self.time == LENGTH
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        return np.float32([0, self.time / LENGTH]), reward, over, False, {}


class JaxCue(fl.envs.JaxEnv):
    """`Cue` in JAX."""

    observation_space, action_space = Cue.observation_space, Cue.action_space

    def reset(self, key):
        cue = (jax.random.key_data(key)[1] % 2).astype(jnp.float32)
        return {"cue": cue, "time": jnp.int32(0)}, jnp.stack([2 * cue - 1, 0.0])

    def step(self, state, action, key):
        time = state["time"] + 1
        over = time == LENGTH
        reward = jnp.where(over, jnp.where(action == state["cue"], 1.0, -1.0), 0.0)
        obs = jnp.stack([0.0, time / LENGTH]).astype(jnp.float32)
        return {"cue": state["cue"], "time": time}, obs, reward, over, jnp.bool_(False)


SMALL = {
    "envs_per_runner": 4,
    "rollout_length": 5,
    "sequence_length": 6,
    "burn_in": 3,
    "batch_size": 8,
    "learning_starts": 80,
    "updates_per_step": 0.05,
    "target_update_every": 3,
    "report_every": 4,
    "hidden": (8,),
    "size": 4,
}
LEARNS = SMALL | {
    "batch_size": 32,
    "updates_per_step": 0.1,
    "target_update_every": 20,
    "lr": 5e-3,
    "epsilon_steps": 2_000,
    "report_every": 50,
    "size": 16,
    "hidden": (16,),
}


@pytest.mark.parametrize(
    ("env", "runtime", "settings"),
    [
        (Cue, "local", {"cell": "gru"}),
        pytest.param(JaxCue, "xla", {"prioritized": False}, marks=pytest.mark.system),
    ],
    ids=["gymnasium, prioritised, GRU", "a program, uniform, LSTM"],
)
def test_the_saved_policy_remembers_what_it_saw_first(env, runtime, settings, tmp_path):
    graph = fl.r2d2(env, **LEARNS, **settings)
    with fl.run(graph, runtime=runtime, steps=4_000, out=tmp_path / "run") as run:
        list(run)
    assert run.audit().closed
    played = fl.load(tmp_path / "run", env=env).evaluate(40, seed=100)
    assert played.mean() == 1.0


@pytest.mark.system
def test_a_program_does_what_the_local_runtime_does():
    graph = fl.r2d2(JaxCue, **SMALL)
    local, weights = rows_and_weights(graph, 4)
    fused, others = rows_and_weights(graph, 4, fl.XlaRuntime(chunk=1))
    close((timeless(fused), others), (timeless(local), weights), rtol=1e-3)


@pytest.mark.ray
def test_on_ray_the_same_rows_come(ray_up):
    for shards in (1, 2):
        graph = fl.r2d2(Cue, **SMALL, num_runners=2).set("replay.shards", shards)
        local, weights = rows_and_weights(graph, 4)
        rows, others = rows_and_weights(graph, 4, RAY)
        assert timeless(rows) == timeless(local) and same(weights, others)


def test_shares_of_sequences_and_priorities_are_counted_and_planned():
    plan = fl.r2d2(Cue, **SMALL).compile()
    text = str(plan)
    assert "8 sequences of 9 steps a batch, 4 batches a row" in text
    assert "replay ratio 3.6: " in text and "32 sequences a row" in text
    assert "100,000 steps, prioritized, sequences of 9" in text


def without(graph, policy=None, **changes):
    for address, value in changes.items():
        graph = graph.set(address.replace("__", "."), value)
    if policy is not None:
        graph = graph.set("runners.policy", policy).set("learner.policy", policy)
    return graph


DQN = fl.dqn("CartPole-v1", envs_per_runner=4)
R2D2 = fl.r2d2("CartPole-v1", **SMALL)
RECURRENT = fl.Policy(fl.networks.RecurrentQNetwork)


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (
            without(R2D2, replay__sequence_length=None),
            (
                r"r2d2\.batch: samples single transitions, but R2D2Loss of learner trains on "
                r"sequences; set replay\.sequence_length, or take DQNLoss"
            ),
        ),
        (
            without(DQN, replay__sequence_length=8),
            (
                r"dqn\.batch: samples sequences, but DQNLoss of learner trains on single "
                r"transitions; leave replay\.sequence_length out, or take R2D2Loss"
            ),
        ),
        (
            without(DQN, policy=RECURRENT),
            (
                r"dqn\.learner: DQNLoss trains on single transitions, .* RecurrentQNetwork can't; "
                r"take fl\.networks\.QNetwork, or R2D2Loss and "
                r"Replay\(\.\.\., sequence_length=\.\.\.\)"
            ),
        ),
        (
            without(DQN, policy=RECURRENT, learner__loss=lambda policy, params, batch: 0.0),
            (
                r"dqn\.add: the replay gives single transitions, from which a recurrent policy "
                r"can't be trained; take Replay\(\.\.\., sequence_length=\.\.\.\) with R2D2Loss"
            ),
        ),
        (
            without(R2D2, policy=fl.Policy(fl.networks.MLP), runners__env="Pendulum-v1"),
            r"R2D2Loss needs a policy whose outputs are the values of n actions .*, not MLP",
        ),
        (
            without(R2D2, runners__env="Pendulum-v1"),
            r"RecurrentQNetwork has a value for each of n actions, not for Box",
        ),
        (
            without(R2D2, learner__loss=fl.losses.R2D2Loss(burn_in=9)),
            r"r2d2\.train: .*burn_in=9 leaves no row of sequences of 9 to train on",
        ),
        (
            without(R2D2, batch__learning_starts=1),
            r"r2d2\.batch: replay has nothing to sample: no environment has 9 rows in it",
        ),
        (
            without(R2D2, replay__buffer_size=80 - 28, batch__learning_starts=8),
            (
                r"holds 13 steps of each environment, too few for rollouts of 5 and sequences of "
                r"9; raise buffer_size to 56 or more"
            ),
        ),
        (
            R2D2.insert(after="sample", first=fl.InitialPriorities()),
            r"r2d2\.first: judges single steps, but replay samples sequences",
        ),
        (
            without(R2D2, policy=fl.Policy(fl.networks.RecurrentQNetwork, cell="rnn")),
            r"cell must be one of lstm, gru, got 'rnn'",
        ),
    ],
)
def test_what_is_wrong_is_reported_before_anything_runs(graph, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        graph.compile()
