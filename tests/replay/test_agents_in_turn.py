"""What replays give of agents that take turns, beside what the environment did."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from flowrl.core.workers import Failed
from flowrl.envs.agents import Agents, End, Turn
from flowrl.graph.site import HereSite, Place
from flowrl.rl.policies import network

NAMES, GAMMA, TURNS = ("a", "b"), 0.9, 24
SEEN = gym.spaces.Box(0, 1e6, (3,), np.float32)
POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))


class InTurn(Agents):
    """Two agents act `burst` times in a row each; rewards and observations say at which turn."""

    names = NAMES

    def __init__(self, burst=1):
        self.burst, self.episode = burst, -1

    def spaces_of(self, agent):
        return SEEN, gym.spaces.Discrete(2)

    def reset(self, seed=None):
        self.episode += 1
        self.taken, self.gained = {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}
        return Turn({"a": self.seen("a")}, {}, {})

    def seen(self, agent):
        return np.float32([NAMES.index(agent), self.episode, self.taken[agent]])

    def step(self, actions):
        (agent,) = actions
        self.taken[agent] += 1
        self.gained[agent] += 1 + self.taken[agent] / 8
        turns = sum(self.taken.values())
        if turns == TURNS:
            ends = {name: End(True, False, self.seen(name)) for name in NAMES}
            return Turn({}, dict(self.gained), ends)
        following = NAMES[turns // self.burst % 2]
        reward, self.gained[following] = {following: self.gained[following]}, 0.0
        return Turn({following: self.seen(following)}, reward, {})

    def close(self):
        pass


class InTurnInJax(fl.envs.JaxAgents):
    """The same."""

    observation_spaces = dict.fromkeys(NAMES, SEEN)
    action_spaces = dict.fromkeys(NAMES, gym.spaces.Discrete(2))

    def __init__(self, burst=1):
        self.burst = burst

    def seen(self, state):
        return {
            name: jnp.stack([jnp.float32(i), state["episode"], state["taken"][i]])
            for i, name in enumerate(NAMES)
        }

    def acts(self, taken):
        turns = jnp.sum(taken).astype(int)
        return {
            name: (turns // self.burst % 2 == i) & (turns < TURNS) for i, name in enumerate(NAMES)
        }

    def reset(self, key):
        episode = jax.random.randint(key, (), 0, 100_000).astype(jnp.float32)
        state = {"episode": episode, "taken": jnp.zeros(2)}
        return state, self.seen(state), self.acts(state["taken"])

    def step(self, state, actions, key):
        acting = jnp.stack([self.acts(state["taken"])[name] for name in NAMES])
        taken = state["taken"] + acting
        state = {**state, "taken": taken}
        reward = dict(zip(NAMES, acting * (1 + taken / 8), strict=True))
        over = dict.fromkeys(NAMES, jnp.sum(taken) == TURNS)
        no = dict.fromkeys(NAMES, jnp.bool_(False))
        return state, self.seen(state), reward, over, no, self.acts(taken)


def turns_of(agent, burst):
    """How often an agent acts in an episode."""
    return sum(turn // burst % 2 == agent for turn in range(TURNS))


def transitions(env, burst, steps, n_step):
    """All transitions that a replay has after some rollouts."""
    runners = fl.Runners(
        env, POLICY, envs_per_runner=2, rollout_length=steps, env_settings={"burst": burst}
    )
    replay = fl.Replay(10_000, n_step=n_step, gamma=GAMMA)
    place = Place("g", {"runners": runners, "replay": replay}, 0, HereSite)
    handles = place.open()
    for _ in range(60):
        handles["replay"].add(handles["runners"].collect())
    if env is InTurn:
        ring = handles["replay"].pool.objects[0]
        data = ring._beginning_at(np.flatnonzero(ring.usable), {}, {}).data
        found = {name: x[0] for name, x in data.items()}
    else:
        arrays = handles["replay"].arrays
        slots = jnp.asarray(np.flatnonzero(np.asarray(arrays["usable"]).reshape(-1)))
        found = handles["replay"].core._transitions(arrays, slots)
    place.close()
    return [np.asarray(found[name]) for name in ("obs", "reward", "discount", "next_obs")]


@pytest.mark.parametrize("env", [InTurn, InTurnInJax])
@pytest.mark.parametrize(
    ("burst", "steps"),
    [
        pytest.param(1, 1, marks=pytest.mark.system),
        (1, 2),
        (3, 2),
        pytest.param(5, 4, marks=pytest.mark.system),
    ],
)
def test_returns_of_several_steps_count_an_agents_own_turns(env, burst, steps):
    seen, lengths = 0, set()
    for obs, reward, discount, after in zip(*transitions(env, burst, steps, 3), strict=True):
        turns = int(after[2] - obs[2])
        assert obs[1] == after[1] and 1 <= turns <= 3
        over = after[2] == turns_of(int(obs[0]), burst)
        rewards = [1 + (obs[2] + k + 1) / 8 for k in range(turns)]
        assert reward == pytest.approx(sum(GAMMA**k * x for k, x in enumerate(rewards)), rel=1e-5)
        assert discount == pytest.approx(0.0 if over else GAMMA**turns)
        seen, lengths = seen + 1, lengths | {turns}
    assert seen > 30 and 1 in lengths


@pytest.mark.parametrize("env", [InTurn, InTurnInJax])
def test_what_gaps_between_rollouts_would_spoil_is_refused(env):
    with pytest.raises(fl.errors.CheckError, match="sequences of 30 rows .* rollouts of 10, bet"):
        fl.r2d2(env).compile()
    fl.r2d2(env, rollout_length=30).compile()
    with pytest.raises(fl.errors.CheckError, match="set normalize_rewards of the runners"):
        fl.dqn(env, normalize_rewards=True).compile()


def test_a_runner_that_is_restarted_explores_on_from_where_the_old_one_was(monkeypatch):
    handle = fl.Runners(InTurn, POLICY, envs_per_runner=2, rollout_length=25).open()
    for _ in range(3):
        handle.collect()
    (old,) = handle.pool.objects
    (turn,) = [part.turn for part in old.parts.values()]
    # Each agent acts in every second step.
    assert turn > 3 * 25
    submit, failures = handle.pool.submit, [fl.errors.RunError("gone")]
    begun = []

    def submit_once_failing(runner, verb, *args):
        if verb == "sample" and failures:
            return Failed(failures.pop())
        begun.extend(args if verb == "go_on" else ())
        return submit(runner, verb, *args)

    monkeypatch.setattr(handle.pool, "submit", submit_once_failing)
    handle.collect()
    handle.close()
    assert handle.pool.objects != [old] and begun == [turn]


@pytest.mark.parametrize("env", [InTurn, InTurnInJax])
def test_a_schedule_counts_environment_steps_whoever_acts(env):
    q = fl.Policy(fl.networks.QNetwork, hidden=(8,))
    explore = fl.EpsilonGreedy(1.0, 0.0, 1_000)
    runners = fl.Runners(env, q, envs_per_runner=2, rollout_length=25, explore=explore)
    net = network(q, runners.by_policy[""].spaces())
    weights = net.init(jax.random.key(1))
    place = Place("g", {"runners": runners}, 0, HereSite)
    handle = place.open()["runners"]
    handle.publish(weights, np.int32(0))
    steps, differing = 0, np.zeros(3)
    while steps < 1_500:
        batch = handle.collect()
        rows = np.asarray(batch["valid"])
        greedy = np.asarray(net.apply(weights, np.asarray(batch["obs"])[rows])[0].mode())
        different = greedy != np.asarray(batch["action"])[rows]
        differing[steps // 500] += different.sum()
        steps += len(different)
    place.close()
    # Half of the random actions are greedy: epsilon is 0.75, then 0.25, then 0.
    assert 120 < differing[0] < 250 and 25 < differing[1] < 110 and differing[2] <= 5
