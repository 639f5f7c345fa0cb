"""Stock graphs take their own settings, and say so."""

import dataclasses
import re

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.algos import STOCK
from flowrl.cli.commands import documented
from flowrl.cli.main import main
from flowrl.rl.networks import Images
from flowrl.rl.policies import network


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("wrong", [{"lr": 1e-3}, fl.Adam()])
def test_settings_of_another_kind_are_refused_by_name(name, wrong):
    with pytest.raises(
        fl.errors.SettingError,
        match=r"settings must be fl\.\w+Settings\(\.\.\.\), got (\{'lr'|Adam)",
    ):
        getattr(fl, name)("CartPole-v1", wrong)


@pytest.mark.parametrize("name", STOCK)
def test_widths_reach_every_policy_of_a_graph(name):
    found = re.findall(r"\bhidden=(\(.*?\))", str(getattr(fl, name)(hidden=(8, 4))))
    assert found and set(found) == {"(8, 4)"}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("ppo", "hidden"), ("sac", "alpha"), ("dqn", "dueling"), ("dqn", "atoms")),
        *(("td3", "critics"), ("r2d2", "size")),
    ],
)
def test_what_describes_the_default_policy_is_refused_beside_another_one(name, setting):
    make, kind = getattr(fl, name), STOCK_SETTINGS[name]
    policy = make("CartPole-v1").resources["learner"].policy
    wrong = {"hidden": (8,), "dueling": True}.get(setting, 7)
    for given in ({"policy": policy}, {"settings": kind(policy=policy)}):
        with pytest.raises(
            fl.errors.SettingError,
            match=rf"{setting} describes the default policy.*Policy\(\.\.\., {setting}=",
        ):
            make("CartPole-v1", **given, **{setting: wrong})
    same = make("CartPole-v1", policy=policy, **{setting: getattr(kind, setting)})
    assert same.resources["learner"].policy == policy


def test_images_take_one_width():
    class Screens(Clockwork):
        observation_space = gym.spaces.Box(0, 255, (50, 50, 3), np.uint8)

    graph = fl.ppo(Screens, hidden=(32,))
    assert graph.resources["learner"].policy == fl.Policy(fl.networks.CNN, hidden=32)
    for wrong in ((64, 64), 64):
        with pytest.raises(
            fl.errors.SettingError, match=rf"one layer after.*got {re.escape(str(wrong))}$"
        ):
            fl.ppo(Screens, hidden=wrong)


STOCK_SETTINGS = {
    "ppo": fl.PPOSettings,
    "a2c": fl.A2CSettings,
    "a3c": fl.A3CSettings,
    "pg": fl.PGSettings,
    "impala": fl.IMPALASettings,
    "appo": fl.APPOSettings,
    "dqn": fl.DQNSettings,
    "rainbow": fl.RainbowSettings,
    "apex": fl.ApexSettings,
    "r2d2": fl.R2D2Settings,
    "sac": fl.SACSettings,
    "td3": fl.TD3Settings,
    "ddpg": fl.DDPGSettings,
    "vdn": fl.VDNSettings,
    "qmix": fl.QMIXSettings,
    "multi_ppo": fl.MultiPPOSettings,
    "es": fl.ESSettings,
    "ars": fl.ARSSettings,
    "bc": fl.BCSettings,
    "marwil": fl.MARWILSettings,
    "iql": fl.IQLSettings,
    "cql": fl.CQLSettings,
}


@pytest.mark.parametrize("name", STOCK_SETTINGS)
def test_every_setting_is_documented_and_listed_with_its_default(name, capsys):
    kind = STOCK_SETTINGS[name]
    meanings = documented(kind)
    assert list(meanings) == [field.name for field in dataclasses.fields(kind)]
    assert main(["run", name, "--help-settings"]) == 0
    out = capsys.readouterr().out
    for field, meaning in meanings.items():
        assert len(meaning.split()) >= 3 and "(default " in meaning, field
        assert f"  {field} " in out and meaning in out


NUMBERS = {
    "gamma": 0.5, "gae_lambda": 0.25, "tau": 0.125, "n_step": 7, "beta_steps": 77, "burn_in": 3,
    "clip_ratio": 0.375, "vf_coef": 0.625, "ent_coef": 0.0625, "kl_coef": 0.75, "eta": 0.875,
    "beta": 2.5, "expectile": 0.8125, "cql_coef": 3.5, "sigma": 0.03125,
    "target_noise": 0.3125, "target_noise_clip": 0.1875,
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK_SETTINGS)
def test_a_number_reaches_every_field_of_its_name(name):
    """Such as a discount: that of the replay, of the loss, and of operators at the sampler."""
    fields = {field.name for field in dataclasses.fields(STOCK_SETTINGS[name])}
    given = {field: value for field, value in NUMBERS.items() if field in fields}
    text = getattr(fl, name)(**given).text()
    for field, value in given.items():
        # The returns of sequences are the loss's own, so those of their replay are of one step.
        others = {"1"} if (name, field) == ("r2d2", "n_step") else set()
        assert set(re.findall(rf"\b{field}=([\d._]+)", text)) == {str(value)} | others, field


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg"])
def test_rates_of_their_own_reach_their_groups(name):
    """And the noise on the actions of a deterministic policy reaches its exploration."""
    rates = {"lr": 1e-4, "critic_lr": 2e-4, **({"alpha_lr": 3e-4} if name == "sac" else {})}
    for given in (rates, {"lr": 1e-4, "critic_lr": 2e-4}):
        groups = getattr(fl, name)(**given).resources["learner"].optimizer.groups
        wanted = {"actor": 1e-4, "critic": 2e-4}
        if name == "sac":
            wanted["temperature"] = given.get("alpha_lr", 1e-4)
        assert {group: optimizer.lr for group, optimizer in groups.items()} == wanted
    if name != "sac":
        explore = getattr(fl, name)(noise=0.4375).resources["runners"].explore
        assert explore.then.deviation == 0.4375


def test_single_settings_are_keywords_and_names_of_other_libraries_lead_to_ours():
    graph = fl.ppo("CartPole-v1", lr=1e-2, num_runners=4)
    assert graph == fl.ppo("CartPole-v1", fl.PPOSettings(lr=1e-2, num_runners=4))
    both = fl.ppo("CartPole-v1", fl.PPOSettings(lr=1e-2), epochs=3)
    assert both == fl.ppo("CartPole-v1", fl.PPOSettings(lr=1e-2, epochs=3))
    known = {"learning_rate": "lr", "n_steps": "rollout_length", "ent_coeff": "ent_coef"}
    more = {"num_envs": "envs_per_runner", "lrr": "lr", "net_arch": "hidden"}
    for foreign, ours in {**known, **more}.items():
        with pytest.raises(fl.errors.SettingError, match=f"'{foreign}'; did you mean '{ours}'"):
            fl.ppo("CartPole-v1", **{foreign: 1})
    for foreign, ours in {"noise_stdev": "sigma", "n_delta": "pairs", "n_top": "top"}.items():
        with pytest.raises(fl.errors.SettingError, match=f"'{foreign}'; did you mean '{ours}'"):
            fl.ars("CartPole-v1", **{foreign: 1})


class Pictures(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)

    def _obs(self):
        return np.full((7, 7, 3), self.time, np.uint8)


PIXELS = fl.Policy(fl.networks.QNetwork, channels=(4,), kernels=(3,), strides=(1,))
QUICK = {"envs_per_runner": 2, "learning_starts": 8, "batch_size": 8, "report_every": 1}


@pytest.mark.parametrize(
    ("policy", "convolves"),
    [(None, False), (PIXELS, True)],
    ids=["fully connected", "kernels of one's own"],
)
def test_dqn_learns_from_small_images(policy, convolves, tmp_path):
    graph = fl.dqn(Pictures, fl.DQNSettings(policy=policy, **QUICK))
    with fl.run(graph, steps=32, out=tmp_path / "run") as run:
        assert list(run)[-1]["updates"] >= 1
    loaded = fl.load(tmp_path / "run", allow=["test_settings"])
    assert bool(network(loaded.policy, loaded.spaces).layers(Images)) == convolves
    np.testing.assert_array_equal(loaded.evaluate(1), [1.0 * 3])


@pytest.mark.parametrize(("size", "convolves"), [(36, True), (35, False)])
def test_stock_policies_of_both_kinds_convolve_from_the_same_size_on(size, convolves):
    class Sized(Clockwork):
        observation_space = gym.spaces.Box(0, 255, (size, 50, 3), np.uint8)

    ppo, dqn = (graph.resources["runners"] for graph in (fl.ppo(Sized), fl.dqn(Sized)))
    assert [bool(network(r.policy, r.spaces()).layers(Images)) for r in (ppo, dqn)] == [
        convolves
    ] * 2


@pytest.mark.parametrize("name", ["ppo", "pg", "a2c"])
def test_small_images_are_normalised_where_that_is_asked_for(name):
    kind = {"ppo": fl.PPOSettings, "pg": fl.PGSettings, "a2c": fl.A2CSettings}[name]
    runners = getattr(fl, name)(Pictures, kind(normalize=True)).resources["runners"]
    assert network(runners.policy, runners.spaces()).layers(fl.networks.RunningNorm)


class Pushed(Clockwork):
    """Any push is allowed."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))


def bounded(env):
    return gym.wrappers.TransformAction(env, np.asarray, gym.spaces.Box(-3, 3, (1,)))


def test_sac_refuses_actions_without_bounds_and_its_way_out_works():
    graph = fl.sac(Pushed, fl.SACSettings(learning_starts=4, batch_size=4, report_every=4))
    with pytest.raises(
        fl.errors.CheckError,
        match=r"sac\.learner: SACNetwork has actions in \[-1, 1\].*TransformAction",
    ):
        graph.compile()
    with fl.run(graph.set("runners.wrappers", (bounded,)), steps=10) as run:
        assert next(run)["updates"] >= 1


def test_tuned_settings_of_a_graph_that_is_not_there_are_an_error():
    with pytest.raises(fl.errors.SettingError, match="unknown graph 'pppo'; did you mean 'ppo'"):
        fl.tuned("pppo", "CartPole-v1")
    assert fl.tuned("mine.py:pppo", "CartPole-v1") == {}


def test_an_id_without_a_version_has_the_tuned_settings_of_the_newest():
    assert fl.tuned("ppo", "HalfCheetah") == fl.tuned("ppo", "HalfCheetah-v5") != {}
    assert fl.tuned("ppo", "NoSuch") == fl.tuned("ppo", "pettingzoo:classic.tictactoe_v3") == {}
