"""A replay in host memory at work: whose experience it holds, and shards that are lost."""

import pytest

import flowrl as fl

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
