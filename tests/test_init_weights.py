"""A run that begins with the weights of another one."""

import json

import jax
import numpy as np
import pytest

import flowrl as fl
from environments import Corridor
from flowrl.cli.main import main
from flowrl.core.events import Tap, WeightsSent

NET = fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True)
OTHER = fl.Policy(fl.networks.MLP, hidden=(9,), normalize=True)
SETTINGS = fl.PPOSettings(
    rollout_length=16, envs_per_runner=4, batch_size=64, minibatch_size=64, epochs=1, policy=NET
)
PPO = fl.ppo("CartPole-v1", SETTINGS)
OBS = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4)


def with_policy(graph, policy):
    return graph.set("learner.policy", policy).set("runners.policy", policy)


def equal(one, other):
    """Whether two trees hold the same numbers."""
    return all(
        np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


def core_of(run):
    with run._session.handle("learner") as handle:
        return jax.device_get(handle.state["core"]), int(handle.state["version"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a short run."""
    path = tmp_path_factory.mktemp("trained") / "run"
    with fl.run(PPO, steps=640, out=path) as run:
        list(run)
    return path


def test_the_first_policy_is_the_saved_one_and_the_rest_begins_as_usual(trained, tmp_path):
    saved, sent = fl.load(trained), []
    out = tmp_path / "run"
    with fl.run(
        PPO, seed=5, init=trained, out=out, observers=[Tap(sent.append, WeightsSent)]
    ) as run:
        assert equal(run.policy.weights, saved.weights)
        assert saved.weights.rest["encoder/norm/count"] > 0
        assert np.array_equal(run.policy.act(OBS), saved.act(OBS))
        core, version = core_of(run)
        assert version == 0
        assert not any(np.any(x) for x in jax.tree.leaves(core["opt"]))
        with run._session.handle("runners") as runners:
            runners.evaluate(3, seed=7)
            assert equal(jax.device_get(runners._weights.evaluated.weights), saved.weights)
        # Those who wait for the first rollout's actions get them from these weights.
        row = next(run)
        assert row["updates"] == 1 and not equal(run.policy.weights, saved.weights)
    assert json.loads((out / "run.json").read_text())["init"] == {
        "policy": str(trained),
        "only": [],
    }
    assert {event.version for event in sent[:2]} == {0}


def test_a_rollout_is_sampled_with_the_saved_weights(trained):
    # With a learning rate of 0 nothing moves: each row's policy is the first one, but for what it
    # has observed.
    saved = fl.load(trained)
    with fl.run(PPO.set("learner.optimizer", fl.Adam(0.0)), init=saved) as run:
        next(run)
        assert equal(run.policy.weights.params, saved.weights.params)
        with run._session.handle("runners") as runners:
            newest = jax.device_get(runners._weights.newest.weights)
            assert equal(newest.params, saved.weights.params)


def test_what_does_not_fit_is_named_before_anything_is_trained(trained, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(fl.errors.SettingError) as caught:
        fl.run(with_policy(PPO, OTHER), init=trained, out=out)
    assert not out.exists()
    text = str(caught.value)
    for name in ("actor/layers/0/bias", "critic/layers/0/kernel", "heads/action/kernel"):
        assert name in text
    assert "is float32[8] in the saved policy and float32[9] in this one" in text
    assert "--init-only encoder/, or fl.Init(..., only=('encoder/',))" in text
    deeper = with_policy(PPO, fl.Policy(fl.networks.MLP, hidden=(8, 8), normalize=True))
    with pytest.raises(fl.errors.SettingError, match="actor/layers/1/bias is missing"):
        fl.run(deeper, init=trained)
    plain = with_policy(PPO, fl.Policy(fl.networks.MLP, hidden=(8,)))
    with pytest.raises(fl.errors.SettingError, match="encoder/norm/count is unknown"):
        fl.run(plain, init=trained)


def test_only_a_part_is_taken(trained):
    head = fl.ppo("Acrobot-v1", SETTINGS)
    parts = ("actor/layers/0/bias", "critic/layers/0/bias")
    with pytest.raises(fl.errors.SettingError, match=r"heads/action/bias is float32\[2\]"):
        fl.run(head, init=trained)
    saved = fl.load(trained).weights
    own = {}
    for init in (None, fl.Init(trained, only=parts)):
        with fl.run(head, init=init) as run:
            own[init is None] = run.policy.weights
            next(run)
    for name, x in own[False].params.items():
        assert equal(x, (saved if name in parts else own[True]).params[name]), name
    assert equal(own[False].rest, own[True].rest)
    with pytest.raises(fl.errors.SettingError, match="no weight has a name that begins with 'bod"):
        fl.run(PPO, init=fl.Init(trained, only=("body/",)))


def test_the_target_network_begins_equal_to_the_weights(tmp_path):
    graph = fl.dqn(
        "CartPole-v1",
        fl.DQNSettings(
            learning_starts=32, batch_size=8, policy=fl.Policy(fl.networks.MLP, hidden=(8,))
        ),
    )
    with fl.run(graph, steps=200, out=tmp_path / "run") as run:
        list(run)
    with fl.run(graph, seed=3, init=tmp_path / "run") as run:
        core, _ = core_of(run)
        assert equal(core["target"], fl.load(tmp_path / "run").weights.params)
        assert equal(core["target"], core["weights"].params)


@pytest.mark.system
def test_programs_begin_with_them_all_seeds_alike():
    # With a learning rate of 0 the parameters stay what they were at first.
    graph = fl.ppo(Corridor, SETTINGS).set("learner.optimizer", fl.Adam(0.0))
    with fl.run(graph, seed=1) as run:
        next(run)
    saved = run.policy
    kernel = saved.weights.params["actor/layers/0/kernel"]
    for seeds in (None, 2):
        with fl.run(graph, runtime=fl.XlaRuntime(seeds=seeds, chunk=1), init=saved) as run:
            assert equal(run.policy.weights, saved.weights)
            next(run)
            assert equal(run.policy.weights.params, saved.weights.params)
            # Those of the learner, of the optimiser's means, and of what the runners have.
            found = [x for x in run._session.turns.arrays if x.shape[seeds is not None :] == (1, 8)]
            same = [x for x in found if np.array_equal(x, np.broadcast_to(kernel, x.shape))]
            assert len(same) == 2, len(found)


def test_a_graph_without_one_learner_and_what_is_no_policy_are_refused(trained, tmp_path):
    look = fl.Graph("look", runners=fl.Runners("CartPole-v1", NET))
    look = look.then(sample=fl.ParallelSample(), report=fl.Report())
    with pytest.raises(fl.errors.GraphError, match="0 learners; init needs exactly one"):
        fl.run(look, init=trained)
    with pytest.raises(fl.errors.SettingError, match="init takes the directory of a saved run"):
        fl.run(PPO, init=3)
    with pytest.raises(fl.errors.SettingError, match=r"only takes beginnings of names"):
        fl.Init(trained, only="body")
    with pytest.raises(fl.errors.SaveError, match="there is no directory"):
        fl.run(PPO, init=tmp_path / "none")


def test_the_command_line_begins_with_them_and_repeats_it(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "64", "--runtime", "local", "--out"]
    status = main(
        ["run", str(trained), "--init", str(trained), "--init-only", "actor/", *words, "a"]
    )
    assert status == 0
    assert main(["run", "a", "--out", "b"]) == 0
    assert f"begins with weights of {trained}" in capsys.readouterr().err
    noted = [json.loads((tmp_path / x / "run.json").read_text())["init"] for x in "ab"]
    assert noted == [{"policy": str(trained), "only": ["actor/"]}] * 2
    assert main(["run", "ppo", "--env", "CartPole-v1", "--init-only", "actor/", *words, "c"]) == 2
    assert "add that" in capsys.readouterr().err
