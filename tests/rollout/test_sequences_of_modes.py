"""From environments in each of Gymnasium's three reset modes to sequences of a replay.

What is sampled is held against what the environments did, and what a recurrent policy computes over
it against what it computed when it acted.
"""

from functools import cache, partial

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from environments import vector_of
from flowrl.graph.site import HereSite, Place
from flowrl.rl.policies import Weights, network

POLICY = fl.Policy(fl.networks.RecurrentQNetwork, hidden=(4,), size=3)
DRAWN = 12


@cache
def values_of(net):
    """The values of the rows of sequences by weights, compiled once."""

    def values(weights, data, columns):
        memory = net.memory_of(data, columns)
        return net.unroll(weights, data["obs"], memory._replace(reset=memory.reset[:-1]))[1]

    return jax.jit(values)


def follows(batch, i, lengths):
    """Hold the rows of a sequence against `Clockwork`, whose episode k ends after `lengths[k]`."""
    fields = ("obs", "reward", "terminated", "truncated", "valid")
    obs, reward, terminated, truncated, valid = (batch.data[name][:, i] for name in fields)
    after = np.concatenate([obs[1:], batch.columns["bootstrap_obs"][i][None]]).astype(int).tolist()
    for t, (episode, step) in enumerate(obs.astype(int).tolist()):
        last = t == len(obs) - 1
        if not valid[t]:
            assert not (reward[t] or terminated[t] or truncated[t])
            if not last and valid[t + 1]:
                assert after[t] == [episode + 1, 0], "after a masked row an episode begins"
            continue
        over = step + 1 == lengths[episode % len(lengths)]
        assert reward[t] == episode + 1 and after[t] == [episode, step + 1]
        assert terminated[t] == (over and episode % 2 == 0)
        if over:
            assert truncated[t] == (episode % 2 == 1)
        elif truncated[t] and not last:
            assert not valid[t + 1 :].any(), "steps are missing after it"
        assert last or valid[t + 1] != (terminated[t] or truncated[t])


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["NextStep", "SameStep", "Disabled"]),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=2, max_size=2),
    rollout=st.sampled_from([1, 3, 5]),
    length=st.sampled_from([2, 7]),
    seed=st.integers(0, 99),
)
def test_every_sequence_is_one_that_its_environment_made(mode, lengths, rollout, length, seed):
    runners = fl.Runners(
        partial(vector_of, mode, lengths), POLICY, envs_per_runner=2, rollout_length=rollout
    )
    replay = fl.Replay(80, sequence_length=length, extra=("value",), prioritized=True)
    place = Place("g", {"runners": runners, "replay": replay}, seed, HereSite)
    handles = place.open()
    net = network(POLICY, runners.spaces())
    weights = net.init(jax.random.key(seed))
    weights = Weights({name: 3 * x for name, x in weights.params.items()}, weights.rest)
    handles["runners"].publish(weights, 0)
    for _ in range(-(-30 // rollout)):
        handles["replay"].add(handles["runners"].collect())
    ring = handles["replay"].pool.objects[0]
    sampled = ring.sample(DRAWN)
    place.close()
    again = np.asarray(values_of(net)(weights, sampled.data, sampled.columns))
    valid = sampled["valid"]
    np.testing.assert_allclose(again[valid], sampled["value"][valid], rtol=1e-4, atol=1e-5)
    assert valid[0].any()
    for i, slot in enumerate(sampled.columns["slot"].tolist()):
        follows(sampled, i, lengths[slot % 2])
