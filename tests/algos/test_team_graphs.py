"""Graphs over environments of several agents: plans, rows, resumes and mistakes."""

import os
import pickle
import signal

import jax
import numpy as np
import pytest
from jax.tree_util import DictKey, SequenceKey

import flowrl as fl
from conftest import RAY, runner_pids, timeless
from flowrl.cli.main import main
from flowrl.graph.site import HereSite, Place
from flowrl.graph.versions import VersionOwners
from flowrl.rollout.sample import seed_of
from teams import MLP, NAMES, TwoCartPoles, ppo_and_dqn, two_learners


def rows_of(graph, rows=3, **how):
    with fl.run(graph, **how) as run:
        return timeless([next(run) for _ in range(rows)]), run


def test_two_learners_have_columns_of_their_own_and_the_plan_is_what_is_counted():
    graph = two_learners()
    plan = graph.compile()
    assert (plan.found.exact, plan.lag, plan.learners) == (True, 0, NAMES)
    found, run = rows_of(graph)
    counted = run.counts()
    for name in ("updates", "requests", "publishes", "trained_steps", "sampled_steps"):
        assert counted[name] == plan.per_row(name) * len(found), name
    last = found[-1]
    for name in NAMES:
        assert last[f"updates/{name}"] == 3 and last[f"lag_max/{name}"] == 0
        assert last[f"loss/{name}"] != last[f"loss/{NAMES[name == 'red']}"]
        assert last[f"episodes/{name}"] > 0 and last[f"return_mean/{name}"] > 5
    assert last["agent_steps"] == sum(last[f"agent_steps/{name}"] for name in NAMES)
    assert last["env_steps"] <= 3 * 4 * 16 and run.audit().closed
    assert "each sample used 2 times" in str(plan)


def test_learners_at_rates_of_one_and_four_have_a_plan_without_a_warm_up():
    slow = two_learners().insert(after="select_blue", batch_blue=fl.Concat(256))
    plan = slow.set("report.every", 5).compile()
    assert (plan.found.exact, plan.found.rows, plan.found.warmup_rows, plan.lag) == (True, 1, 0, 0)
    assert [plan.per_row("updates", f"train_{name}") for name in NAMES] == [4, 1]
    found, run = rows_of(slow.set("report.every", 5))
    counted = run.counts()
    for name in ("updates", "requests", "publishes", "trained_steps"):
        assert counted[name] == plan.per_row(name) * len(found), name
    assert (found[-1]["lag_max/red"], found[-1]["lag_max/blue"]) == (0, 0)


def test_versions_are_counted_by_the_learner_of_the_policy_that_acted():
    graph = two_learners().insert(after="select_blue", batch_blue=fl.Concat(256))
    place = Place(graph.name, graph.resources, 0, HereSite)
    owners = VersionOwners(graph, place.open())
    place.close()
    assert owners.of_node("sample") == ""
    assert {name: owners.of_node(f"train_{name}") for name in NAMES} == {n: n for n in NAMES}
    assert owners.of_node("batch_blue") == "blue"
    inside = (SequenceKey(2), DictKey("queue"), SequenceKey(0), DictKey("blue"), DictKey("version"))
    assert owners.of((SequenceKey(1), DictKey("runners"), DictKey("red"))) == "red"
    owners.nodes["queue"] = owners.nodes["sample"]
    assert owners.of(inside) == "blue"


def test_each_learner_has_a_policy_of_its_own():
    run = fl.run(two_learners())
    next(run)
    at_work = run.policies
    run.close()
    assert list(run.policies) == ["red", "blue"]
    obs = [0.1, 0.2, 0.3, 0.4]
    for name in NAMES:
        assert run.policies[name].act(obs) == at_work[name].act(obs)
        assert run.policies[name].spaces == fl.Runners("CartPole-v1", MLP).spaces()
    weights = [run.policies[name].weights for name in NAMES]
    with pytest.raises(AssertionError, match="not equal"):
        jax.tree.map(np.testing.assert_array_equal, *weights)
    with pytest.raises(fl.errors.GraphError, match=r"take run.policies\['red'\]"):
        run.policy  # noqa: B018


def test_each_policy_learns_from_its_own_agents_alone():
    whole, _ = rows_of(two_learners())
    # What red does changes nothing for blue, for the two poles have nothing to do with each other.
    other, _ = rows_of(two_learners().set("red.optimizer.lr", 0.1))
    for name in ("loss", "entropy", "return_mean", "agent_steps"):
        assert [row[f"{name}/blue"] for row in whole] == [row[f"{name}/blue"] for row in other]
    assert whole[-1]["loss/red"] != other[-1]["loss/red"]


@pytest.mark.system
def test_on_ray_the_same_rows_come(ray_up):
    graph = two_learners(num_runners=2)
    assert rows_of(graph)[0] == rows_of(graph, runtime=RAY)[0]


def test_one_policy_for_all_agents_needs_nothing_else():
    small = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 8, "batch_size": 32}
    found, run = rows_of(fl.ppo(TwoCartPoles, minibatch_size=16, policy=MLP, **small))
    assert found[-1]["agent_steps"] > found[-1]["env_steps"] and run.audit().closed


def test_a_run_of_two_policies_goes_on_bit_for_bit(tmp_path):
    graph = two_learners()
    with fl.run(graph, steps=64 * 8) as run:
        whole = timeless(list(run))
    with fl.run(graph, steps=64 * 3, out=tmp_path / "x", snapshots=fl.Snapshots(every=0)) as run:
        begun = list(run)
    with fl.resume(tmp_path / "x", steps=64 * 8, allow=["teams"]) as run:
        list(run)
        assert 0 < len(begun) < len(run.rows)
        assert timeless(run.rows) == whole


def test_two_algorithms_learn_from_one_stream_each_by_its_own_rules():
    graph = ppo_and_dqn()
    plan = graph.compile()
    # PPO learns on fresh data alone, though there is a replay in the graph.
    assert max(plan.found.lags["train_red"]) == 0
    found, run = rows_of(graph, rows=6)
    counted = run.counts()
    assert counted["updates"] == found[-1]["updates"] and run.audit().closed
    assert found[-1]["updates/blue"] > found[-1]["updates/red"] > 0
    assert "entropy/red" in found[-1] and "entropy/blue" not in found[-1]


def test_rules_are_about_the_policy_that_a_learner_trains():
    def problem(graph):
        with pytest.raises(fl.errors.CheckError) as caught:
            graph.compile()
        return str(caught.value)

    sampled = problem(ppo_and_dqn(explore={}))
    assert "blue" in sampled and "act by a stochastic policy" in sampled
    greedy = problem(ppo_and_dqn(explore=fl.EpsilonGreedy(0.1)))
    assert "runners.red: act by EpsilonGreedy, for which PPOLoss does not correct" in greedy
    other = problem(ppo_and_dqn().set("replay.runners", "runners.red"))
    assert "replay holds the experience of runners.red, but sample gets it from runners.bl" in other
    both = ppo_and_dqn().set("red.policy", fl.Policy(fl.networks.MLP, hidden=(4,)))
    assert "red: trains Policy(" in problem(both) and "but runners.red act with" in problem(both)
    with pytest.raises(fl.errors.SettingError, match="explore: unknown policy 'rad'; did you mea"):
        ppo_and_dqn(explore={"rad": fl.EpsilonGreedy(0.1)})


@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_killed_runner_of_two_policies_is_restarted_and_gets_the_weights_of_both():
    graph = two_learners(num_runners=2)
    with fl.run(graph, runtime=fl.RayRuntime(processes=2)) as run:
        next(run)
        os.kill(runner_pids()[0], signal.SIGKILL)
        rows = [next(run) for _ in range(6)]
    assert rows[-1]["restarts"] == 1 and rows[-1]["lost_steps"] > 0
    # The new runner acts by the newest weights of both, so no policy lags.
    assert all(row[f"lag_max/{name}"] == 0 for row in rows for name in NAMES)
    assert run.audit().closed


def test_a_recorded_update_of_one_of_two_learners_names_agents_and_runs_again(tmp_path, capsys):
    with fl.run(two_learners(num_runners=2), out=tmp_path / "x", record=True) as run:
        next(run)
    for name in NAMES:
        words = [str(tmp_path / "x"), "--update", "1", "--learner", name]
        assert main(["why", *words]) == 0
        text = capsys.readouterr().out
        assert f"columns are the agents of each environment: {name}" in text
        # Runner 1 has the environments from number 4 on, though its columns are agents.
        assert "4 to 7" in text and f", {name}, step " in text
        # Environments are reset by the seeds of the runners, whichever policy acts.
        assert str(seed_of(0, "runners", 1)) in text
        assert main(["rerun", *words, "--import", "teams"]) == 0
        assert "equal to the record to the bit" in capsys.readouterr().out


def mistakes():
    def team(**how):
        policies = dict.fromkeys(how.pop("names", NAMES), MLP)
        return lambda: two_learners().set("runners.policy", fl.Team(**policies, **how)).compile()

    return {
        "an agent without a policy": (
            team(of={"red": "red"}),
            "agent blue of TwoCartPoles has no policy; add it to of={...}, which names those of ",
        ),
        "a policy without an agent": (
            team(names=(*NAMES, "green")),
            "policy green acts for no agent of TwoCartPoles, whose agents are red, blue; name one",
        ),
        "an agent with an unknown policy": (
            team(of={"red": "red", "blue": "bleu"}),
            "agent blue of TwoCartPoles has an unknown policy 'bleu'; did you mean 'blue'? Known: ",
        ),
        "a Select of an unknown name": (
            lambda: two_learners().set("select_red.policy", "rad").compile(),
            "unknown policy 'rad'; did you mean 'red'? Known: red, blue",
        ),
        "a learner of two policies": (
            lambda: two_learners().set("red.runners", "runners").compile(),
            "runners have several policies; name one of them: runners.red, runners.blue",
        ),
        "a learner of an unknown policy": (
            lambda: two_learners().set("red.runners", "runners.rad").compile(),
            "unknown part of a resource 'runners.rad'; did you mean 'runners.red'?",
        ),
        "a team where there is one agent": (
            lambda: two_learners("CartPole-v1").compile(),
            "CartPole-v1 has but one agent; give its runners a policy, no team",
        ),
        "no policies": (lambda: fl.Team(of={}), "a team needs policies: fl.Team("),
    }


@pytest.mark.parametrize("what", mistakes())
def test_a_mistake_is_reported_before_the_run_with_a_way_out(what):
    make, text = mistakes()[what]
    with pytest.raises(fl.errors.FlowrlError) as caught:
        make()
    assert text in str(caught.value)


class Different(TwoCartPoles):
    def action_space(self, agent):
        space = super().action_space(agent)
        return space if agent == "red" else type(space)(3)


class Reward(TwoCartPoles):
    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, {**reward, "green": 1.0}, *rest


class Late(TwoCartPoles):
    """Gives a reward to an agent whose episode is over."""

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        if over := [name for name in NAMES if name not in actions]:
            obs.pop(over[0])
            reward[over[0]] = 1.0
            self.agents = [name for name in self.agents if name != over[0]]
        return obs, reward, *rest


class Leaves(TwoCartPoles):
    """An agent leaves without an end of its episode."""

    def step(self, actions):
        found = super().step(actions)
        self.agents = [name for name in self.agents if name != "blue"]
        return found


class Broken(TwoCartPoles):
    def step(self, actions):
        raise ValueError("no such level")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Different, "one policy acts for red and blue of Different, whose spaces differ"),
        (Reward, "environment 0 of Reward: unknown agent 'green'"),
        (Late, "of Late gave a reward of 1 to agent "),
        (Leaves, "environment 0 of Leaves: agent blue left before its episode ended"),
        (Broken, "environment 0 of Broken raised in step({'red': "),
        (Broken, "); it happened at its step 1 since it was made, 1 of an episode"),
    ],
)
def test_what_an_environment_does_wrong_is_reported_with_its_agent(env, text):
    small = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 64, "batch_size": 256}
    with pytest.raises(fl.errors.FlowrlError) as caught:
        rows_of(fl.ppo(env, minibatch_size=64, policy=MLP, **small))
    assert text in str(caught.value)


def test_a_function_of_the_user_s_own_may_take_a_part_out():
    two_learners().replace(select_blue=fl.Map(lambda batch: batch["blue"])).compile()


def test_a_team_is_text_and_back():
    of = {"red": "blue", "blue": "red"}
    graph = two_learners().set("runners.policy", fl.Team(red=MLP, blue=MLP, of=of))
    again = fl.Graph.from_text(graph.text(), allow=["teams"])
    assert again.text() == graph.text() and again == graph
    assert again.resources["runners"].agents == {"red": ("blue",), "blue": ("red",)}
    assert again.set("runners.policy.red.hidden", (4,)) != graph
    assert pickle.loads(pickle.dumps(graph)) == graph
