"""Teams that cooperate: VDN and QMIX over a joint environment, and PPO of several agents."""

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from conftest import RAY, timeless, with_system
from teams import Relay, TwoCartPoles

SMALL = {
    "envs_per_runner": 2,
    "rollout_length": 4,
    "learning_starts": 24,
    "batch_size": 8,
    "updates_per_step": 0.25,
    "report_every": 4,
    "target_update_every": 3,
    "hidden": (8,),
}
QMIX = {**SMALL, "mixing": 4, "hyper_hidden": 4}
GRAPHS = {
    "vdn": fl.vdn(Relay, **SMALL),
    "qmix": fl.qmix(Relay, **QMIX, prioritized=True, n_step=2, normalize=True),
}
PPO = {"envs_per_runner": 2, "rollout_length": 16, "batch_size": 32, "minibatch_size": 16}


def rows_of(graph, rows=3, **how):
    with fl.run(graph, **how) as run:
        return timeless([next(run) for _ in range(rows)]), run


@pytest.mark.parametrize("name", with_system(GRAPHS, {"qmix"}))
def test_what_a_team_plans_it_does_and_its_text_is_parsed_back(name):
    plan = GRAPHS[name].compile()
    found, run = rows_of(plan, 8)
    counted = run.counts()
    assert found[-1]["updates"] == 8 * plan.per_row("updates") and run.audit().closed
    assert counted["replayed_steps"] == counted["used_steps"] == 8 * plan.per_row("replayed_steps")
    assert all(np.isfinite(row["loss"]) for row in found)
    assert "of Relay as one agent" in str(plan)
    again = fl.Graph.from_text(GRAPHS[name].text(), allow=["teams"])
    assert again == GRAPHS[name] and again.text() == GRAPHS[name].text()
    mixer = run.policy.network.name, ("mixer" in str(run.policy.policy))
    assert mixer == ("TeamQNetwork", name == "qmix")


class OnePole:
    """CartPole as an environment of several agents, of which there is one."""

    possible_agents = ("red",)

    def __init__(self):
        self.pole = gym.make("CartPole-v1")

    def observation_space(self, agent):
        return self.pole.observation_space

    def action_space(self, agent):
        return self.pole.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["red"]
        return {"red": self.pole.reset(seed=seed)[0]}, {}

    def step(self, actions):
        *found, _ = self.pole.step(actions["red"])
        self.agents = [] if found[2] or found[3] else ["red"]
        return *({"red": x} for x in found), {}

    def close(self):
        self.pole.close()


@pytest.mark.system
def test_vdn_of_one_agent_is_dqn():
    one, _ = rows_of(fl.vdn(OnePole, **SMALL, dueling=True), 6)
    # Its vectors would be seeded in another way, so single ones are made.
    other, _ = rows_of(fl.dqn(lambda: gym.make("CartPole-v1"), **SMALL, dueling=True), 6)
    assert [row["episodes"] for row in one] == [row["episodes"] for row in other]
    assert one[-1]["episodes"] > 0 and one[-1]["return_mean"] == other[-1]["return_mean"]
    for name in ("loss", "q_mean", "td_error"):
        np.testing.assert_allclose(
            [row[name] for row in one], [row[name] for row in other], rtol=1e-5
        )


def test_a_saved_team_plays_together_and_keeps_to_its_masks(tmp_path):
    with fl.run(GRAPHS["qmix"], out=tmp_path / "x", steps=80) as run:
        list(run)
    loaded = fl.load(tmp_path / "x", allow=["teams"])
    obs, _ = fl.envs.Joint(Relay)().reset()
    action = loaded.act(obs)
    assert action.tolist() == run.policy.act(obs).tolist() and action.shape == (3,)
    # In the first step no agent may take action 0.
    assert (action > 0).all()
    # Each of three agents gains at most (2, 2, 1) times its number in an episode's three steps.
    played = np.array(loaded.evaluate(3, greedy=False))
    assert len(played) == 3 and (played > 0).all() and (played <= 5 * (1 + 2 + 3)).all()


@pytest.mark.system
def test_on_ray_the_same_rows_come(ray_up):
    graph = GRAPHS["vdn"].set("runners.num_runners", 2)
    assert rows_of(graph)[0] == rows_of(graph, runtime=RAY)[0]


def test_where_the_reward_is_shared_the_mean_is_what_one_agent_gains():
    summed, mean = (fl.vdn(Relay, **SMALL, reward=way) for way in ("sum", "mean"))
    both = [rows_of(graph, 1)[0][0]["return_mean"] for graph in (summed, mean)]
    assert both[0] == pytest.approx(3 * both[1]) and both[1] > 0
    joint = fl.envs.Joint(Relay, reward="mean")
    # What is joint already stays as it is.
    assert fl.vdn(joint, **SMALL).resources["runners"].env is joint


def upper(agent):
    return agent.upper()


@pytest.mark.parametrize("policies", ["shared", "separate", {"red": "x", "blue": "y"}, upper])
def test_ppo_of_several_agents_has_a_learner_for_each_policy(policies):
    names = {"shared": [], "separate": ["red", "blue"], upper: ["RED", "BLUE"]}.get(
        policies if not isinstance(policies, dict) else "", ["x", "y"]
    )
    graph = fl.multi_ppo(TwoCartPoles, policies=policies, **PPO, epochs=1)
    plan = graph.compile()
    assert (plan.found.exact, plan.lag) == (True, 0)
    assert list(graph.resources) == ["runners", *(names or ["learner"])]
    found, run = rows_of(plan, 2)
    counted = run.counts()
    for name in ("updates", "requests", "publishes", "sampled_steps"):
        assert counted[name] == plan.per_row(name) * 2, name
    assert [found[-1][f"updates/{name}"] for name in names] == [2] * len(names)
    assert fl.Graph.from_text(graph.text(), allow=["teams", "test_cooperation"]) == graph


def test_one_policy_for_all_agents_is_ppo():
    whole, _ = rows_of(fl.multi_ppo(TwoCartPoles, **PPO, epochs=2))
    assert whole == rows_of(fl.ppo(TwoCartPoles, **PPO, epochs=2))[0]


def test_a_central_critic_sees_the_state_in_training_and_not_in_play(tmp_path):
    graph = fl.multi_ppo(Relay, central_critic=True, **PPO, epochs=1)
    with fl.run(graph, out=tmp_path / "x", steps=64) as run:
        row = list(run)[-1]
    assert np.isfinite(row["loss"])
    turn = fl.envs.WithState(Relay)().reset()
    obs = turn.obs["a"]
    states = [{**obs, "state": np.float32([t, 5 * t])} for t in range(8)]
    assert len({int(run.policy.act(one)) for one in states}) == 1
    net, weights = run.policy.network, run.policy.weights
    arrays = [net.spaces.batched(one)[0] for one in states]
    values = {float(net.apply(weights, net.spaces.tree(one))[1][0]) for one in arrays}
    assert len(values) == 8


def mistakes():
    mlp = fl.Policy(fl.networks.MLP)
    return {
        "a policy without a mixer": (
            lambda: fl.vdn(Relay, policy=mlp).compile(),
            r"or TeamQNetwork for actions of several choices\), not MLP",
        ),
        "no state for the mixer": (
            lambda: fl.qmix(fl.envs.Joint(Relay, state=False)).compile(),
            "a monotonic mixer reads the part 'state' of observations",
        ),
        "one agent": (
            lambda: fl.qmix("CartPole-v1").compile(),
            "CartPole-v1 has but one agent; name an environment of several",
        ),
        "policies of another kind": (
            lambda: fl.multi_ppo(Relay, policies="own"),
            "policies must be 'shared', 'separate', a mapping .*, got 'own'",
        ),
        "separate policies of one agent": (
            lambda: fl.multi_ppo("CartPole-v1", policies="separate"),
            r"CartPole-v1 has but one agent, which has one policy: fl\.ppo\(env\)",
        ),
        "a critic without the state": (
            lambda: fl.multi_ppo(Relay, policy=fl.Policy(fl.networks.CentralCritic)).compile(),
            "CentralCritic reads the part 'own' of observations.*fl.envs.WithState",
        ),
        "noise on choices": (
            lambda: fl.vdn(Relay).set("runners.explore", fl.GaussianNoise()).compile(),
            "GaussianNoise is for actions in a Box; take EpsilonGreedy",
        ),
    }


@pytest.mark.parametrize("what", mistakes())
def test_a_mistake_is_reported_before_the_run_with_a_way_out(what):
    make, text = mistakes()[what]
    with pytest.raises(fl.errors.FlowrlError, match=text):
        make()
