"""From environments in each of Gymnasium's three reset modes to transitions of a replay.

The transitions drawn are held against what the environments did.
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from environments import vector_of
from flowrl.graph.site import HereSite, Place

GAMMA = 0.9
POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))


def expected(episode, step, length, n):
    """The transition of `Clockwork` from a step of an episode: reward, discount, and the
    observation that it leads to."""
    steps = min(n, length - step)
    reward = sum(GAMMA**k * (episode + 1) for k in range(steps))
    terminated = step + steps == length and episode % 2 == 0
    return (
        pytest.approx(reward, rel=1e-5),
        pytest.approx(0.0 if terminated else GAMMA**steps, rel=1e-5),
        (episode, step + steps),
    )


def drawable(ring):
    """All transitions that may be drawn: (environment, observation, reward, discount, next
    observation)."""
    slots = np.flatnonzero(ring.usable)
    drawn = ring._beginning_at(slots, {}, {})
    fields = (drawn.data[k][0].tolist() for k in ("obs", "reward", "discount", "next_obs"))
    return list(zip((slots % ring.envs).tolist(), *fields, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["NextStep", "SameStep", "Disabled"]),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    rollout=st.integers(1, 7),
    n=st.integers(1, 3),
    rollouts=st.integers(2, 12),
)
def test_every_transition_is_one_that_its_environment_made(mode, lengths, rollout, n, rollouts):
    envs = len(lengths)
    runners = fl.Runners(
        partial(vector_of, mode, lengths), POLICY, envs_per_runner=envs, rollout_length=rollout
    )
    replay = fl.Replay(10_000, n_step=n, gamma=GAMMA)
    place = Place("g", {"runners": runners, "replay": replay}, 0, HereSite)
    handles = place.open()
    taken = []
    for _ in range(rollouts):
        batch = handles["runners"].collect()
        taken += [
            (env, *batch["obs"][t, env].astype(int).tolist())
            for t, env in np.argwhere(batch["valid"]).tolist()
        ]
        handles["replay"].add(batch)
    found = drawable(handles["replay"].pool.objects[0])
    place.close()

    recorded = set(taken)
    assert len(recorded) == len(taken), "no step is recorded twice"
    for env, (episode, step), reward, discount, following in found:
        length = lengths[env][int(episode) % len(lengths[env])]
        steps = n
        # Steps that were skipped while other columns filled up cut an episode short before the
        # first of them.
        while any(
            (env, episode, step + k) not in recorded for k in range(min(steps, length - int(step)))
        ):
            steps -= 1
        assert (reward, discount, tuple(following)) == expected(
            int(episode), int(step), length, steps
        )
    newest = {env: max(x for x in recorded if x[0] == env) for env in range(envs)}
    waiting = {
        (env, newest[env][1], newest[env][2] - k) for env in range(envs) for k in range(n - 1)
    }
    assert {(env, int(e), int(s)) for env, (e, s), *_ in found} >= recorded - waiting, (
        "every step but the newest may be drawn"
    )
    if mode == "NextStep" or rollout == 1:
        assert all((env, e, s - 1) in recorded for env, e, s in recorded if s), "no step is skipped"
