"""A replay in host memory at work: whose experience it holds, and shards that are lost."""

from fractions import Fraction

import numpy as np
import pytest
from replayed import World

import flowrl as fl
from flowrl.core.workers import Failed
from flowrl.graph.site import HereSite, Place

DQN = fl.dqn("CartPole-v1", fl.DQNSettings(envs_per_runner=4, rollout_length=4))


def with_demonstrations(runners):
    """DQN, beside which other runners fill a replay that is for these runners."""
    shown = fl.Replay(400, runners=runners)
    resources = {**DQN.resources, "demo": DQN.resources["runners"], "shown": shown}
    graph = fl.Graph("two", **resources).then(**{node.name: node.op for node in DQN.nodes})
    show = fl.ParallelSample(runners="demo")
    return graph.then(show=show, same=fl.Map(_same), keep=fl.ReplayAdd("shown"), after=())


def _same(batch):
    return batch


def test_a_replay_refuses_the_experience_of_other_runners_than_its_own():
    says = (
        "two.keep: shown holds the experience of runners, but show gets it from demo; add that to "
        r"a replay of its own, Replay\(..., runners='demo'\)"
    )
    with pytest.raises(fl.errors.CheckError, match=says):
        with_demonstrations("runners").check()


def test_runners_may_each_have_a_replay():
    graph = with_demonstrations("demo")
    assert not [text for node in graph.nodes for text in node.op.review(graph)]


def test_after_a_batch_is_lost_on_its_way_to_the_only_shard_others_are_added(monkeypatch):
    resources = {"runners": DQN.resources["runners"], "replay": fl.Replay(400)}
    replay = Place("test", resources, 0, HereSite).open()["replay"]
    replay.expect("batch", learning_starts=8, ratio=Fraction(1, 8), alone=True)
    world, submit, lost = World(4, np.random.default_rng(0), 0.0), replay.pool.submit, []

    def lose_the_second(shard, verb, *args):
        if verb == "add" and len(lost) < 2:
            lost.append(verb)
            if len(lost) == 2:
                return Failed(fl.errors.RunError("its process ended"))
        return submit(shard, verb, *args)

    monkeypatch.setattr(replay.pool, "submit", lose_the_second)
    for version in range(2):
        assert replay.has_capacity()
        replay.add(world.rollout(0, 4, 2, version)[0])
        if version == 0:
            assert replay.due("batch")
            replay.claim("batch", 1)
            assert replay.sample(4, "batch") is not None
    claimed = replay.due("batch")
    replay.claim("batch", claimed)
    assert replay.sample(4, "batch") is None and replay.stock().lost == 16
    assert not replay.due("batch") and replay.has_capacity()
    replay.add(world.rollout(0, 4, 2, 2)[0])
    # What was claimed and could not be sampled is due again.
    assert replay.due("batch") == claimed + 1
    assert replay.sample(4, "batch").steps == 4 and replay.stock().closed
