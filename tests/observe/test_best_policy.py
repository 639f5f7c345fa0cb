"""The best policy of a run: which one it is, where it lies, and what survives a kill."""

import json
import shutil
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import optax
import pytest

import flowrl as fl
from environments import Corridor
from flowrl.cli.main import main
from flowrl.observe import best as best_module
from flowrl.observe import saved_policies
from flowrl.observe.best import Best, best_score
from flowrl.observe.manifest import MANIFEST
from flowrl.observe.saved_policies import save_policy
from flowrl.observe.snapshots import NEWEST

NET = fl.Policy(fl.networks.MLP, hidden=(8,))
SETTINGS = fl.PPOSettings(
    rollout_length=16, envs_per_runner=4, batch_size=64, minibatch_size=64, epochs=1, policy=NET
)
CARTPOLE = fl.ppo("CartPole-v1", SETTINGS)


class Match(gym.Env):
    """Shows one of two sides for 8 steps; each action that names the other one is worth 1."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        self.side = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.side]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.observe(), {}

    def step(self, action):
        reward, self.left = float(action != self.side), self.left - 1
        return self.observe(), reward, self.left == 0, False, {}


def ruinous(good, bad, after):
    """Adam whose learning rate has another sign after so many steps."""
    return optax.adam(lambda count: jax.numpy.where(count < after, good, -bad))


RUINOUS = fl.Optax(partial(ruinous, good=0.05, bad=0.2, after=10))


def equal(one, other):
    """Whether two trees hold the same numbers."""
    return all(
        np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
    )


def load(path, which="best"):
    return fl.load(path, which=which, allow=["test_best_policy", "environments"])


@pytest.fixture(scope="module")
def ruined(tmp_path_factory):
    """The directory of a run that learns and then unlearns; its rows, and the weights after each.

    It evaluates before it trains: what is evaluated is what the row before left.
    """
    path = tmp_path_factory.mktemp("best") / "ruined"
    graph = fl.ppo(Match, SETTINGS).set("learner.optimizer", RUINOUS)
    graph = graph.insert(after="sample", play=fl.Evaluate(every=1, episodes=5))
    after = []
    with fl.run(graph, steps=64 * 24, out=path) as run:
        after.append(run.policy.weights)
        after.extend(run.policy.weights for _ in run)
    return path, run.rows, after


def test_the_best_policy_plays_better_than_the_last_one(ruined):
    path, rows, _ = ruined
    best, last = load(path), load(path, "last")
    returns = [row["eval/return_mean"] for row in rows]
    assert returns[0] < max(returns) == 8.0 and returns[-1] < 6.0
    assert best.evaluate(20).mean() == 8.0
    assert last.evaluate(20).mean() < 6.0
    score = best_score(path)
    first = returns.index(8.0)
    assert score == ("eval/return_mean", 8.0, first + 1, rows[first]["env_steps"])


def test_it_has_the_weights_that_were_evaluated_not_those_of_an_update_after_it(ruined):
    path, _, after = ruined
    row = best_score(path).row
    best = load(path)
    assert equal(best.weights, after[row - 1])
    assert not equal(best.weights, after[row])
    # The very episodes of the row.
    assert best.evaluate(5, seed=0).mean() == best_score(path).value


def test_it_is_found_although_the_run_puts_a_better_one_in_its_place(ruined, tmp_path, monkeypatch):
    path = tmp_path / "copy"
    shutil.copytree(ruined[0], path)
    (path / MANIFEST).unlink()
    file, read = path / "best/best.json", saved_policies._load
    named = json.loads(file.read_text())["policy"]

    def replaced(folder, *rest):
        if folder.name == named:
            folder.rename(folder.with_name("row-99"))
            file.write_text(file.read_text().replace(named, "row-99"))
        return read(folder, *rest)

    expected = load(path).weights
    monkeypatch.setattr(saved_policies, "_load", replaced)
    assert equal(load(path).weights, expected)
    assert not (path / "best" / named).exists()


def test_a_killed_run_has_it_and_what_is_damaged_is_named(ruined, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(ruined[0], path)
    (path / MANIFEST).unlink()
    assert equal(load(path).weights, load(ruined[0]).weights)
    with pytest.raises(fl.errors.SaveError, match="no manifest.json"):
        load(path, "last")
    with pytest.raises(fl.errors.SettingError, match="unknown policy 'bset'; did you mean 'best'"):
        load(path, "bset")
    [folder] = [each for each in (path / "best").iterdir() if each.is_dir()]
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(fl.errors.SaveError, match="is not what was written"):
            load(path)
        file.unlink()
        with pytest.raises(fl.errors.SaveError, match="is missing"):
            load(path)
        file.write_bytes(good)
    file = path / "best/best.json"
    for text in ("", "[]", "{", '{"column": "x"}', file.read_text()[:-9]):
        file.write_text(text)
        with pytest.raises(fl.errors.SaveError, match="best.json is damaged"):
            load(path)
    shutil.rmtree(path / "best")
    with pytest.raises(fl.errors.SaveError, match="holds no best policy"):
        load(path)
    # A sealed run has to be whole.
    shutil.copytree(ruined[0], path / "again")
    shutil.rmtree(path / "again/best")
    with pytest.raises(fl.errors.SaveError, match="is missing, though manifest.json lists it"):
        load(path / "again")


class Killed(BaseException):
    """Stands for the end of the process."""


def test_whoever_is_killed_while_writing_leaves_the_old_one_or_the_new_one(
    ruined, tmp_path, monkeypatch
):
    policies = [load(ruined[0], which) for which in ("last", "best")]

    def row(number, value):
        return fl.Row({"x": value, "row": number, "env_steps": 1})

    def dies(*_, **__):
        raise Killed

    def half(policy, path):
        path.mkdir()
        (path / "policy.json").write_text("{")
        raise Killed

    removed = best_module.shutil.rmtree

    def dies_after_the_first(*args, **options):
        # The first clears the way for the new folder.
        monkeypatch.setattr(best_module.shutil, "rmtree", dies)
        removed(*args, **options)

    for name, what, is_new in (
        ("save", half, False),
        ("write_whole", dies, False),
        ("rmtree", dies_after_the_first, True),
    ):
        folder = tmp_path / name
        folder.mkdir()
        best = Best("x", folder, 0.0)
        best.consider([row(1, 1.0)], lambda: policies[0])
        best.write(save_policy)
        best.consider([row(2, 2.0)], lambda: policies[1])
        with monkeypatch.context() as patched, pytest.raises(Killed):
            if name != "save":
                where = best_module.shutil if name == "rmtree" else best_module
                patched.setattr(where, name, what)
            best.write(half if name == "save" else save_policy)
        monkeypatch.setattr(best_module.shutil, "rmtree", removed)
        assert equal(load(folder).weights, policies[is_new].weights), name
        assert best_score(folder).row == 1 + is_new
        # Another process goes on, and clears away what is left.
        again = Best("x", folder, 0.0)
        again.consider([row(2, 2.0)], lambda: policies[1])
        again.write(save_policy)
        assert equal(load(folder).weights, policies[1].weights)
        assert len(list((folder / "best").iterdir())) == 2


def test_only_numbers_that_beat_the_best_are_kept(tmp_path):
    asked = []
    best = Best("x", tmp_path, 0.0)
    for number, value in enumerate([np.nan, 1.0, 1.0, np.inf, 0.5, -np.inf, 2.0]):
        best.consider(
            [fl.Row({"x": value, "row": number, "env_steps": 0})], lambda: asked.append(1)
        )
    # What is not there any more does not count.
    assert len(asked) == 6 - 2 and best.score is None
    best = Best("x", tmp_path, 0.0)
    for number, value in enumerate([np.nan, 1.0, 1.0, np.inf, 0.5, -np.inf, 2.0]):
        best.consider([fl.Row({"x": value, "row": number, "env_steps": 0})], lambda: "a policy")
    assert best.score == ("x", 2.0, 6, 0)


def best_row(rows):
    """The number of the first row with the highest return."""
    return int(np.nanargmax([row["return_mean"] for row in rows])) + 1


def test_a_resumed_run_remembers_the_best_and_forgets_one_of_a_future_that_was_given_up(tmp_path):
    often = fl.Snapshots(every=0, keep=100)
    path, after = tmp_path / "run", []
    with fl.run(CARTPOLE, steps=64 * 8, out=path, snapshots=often) as run:
        for _ in run:
            after.append(run.policy.weights)
            # With each snapshot, so that a run that is killed has it.
            assert best_score(path).row == best_row(run.rows)
    rows = run.rows
    row = best_row(rows)
    # There is a best row before it, and rows after it, or this test would show nothing.
    assert 1 < row < len(rows)
    early = best_row(rows[: row - 1])
    for last in (len(rows), row, row - 1):
        copy = tmp_path / f"until-{last}"
        shutil.copytree(path, copy)
        for file in (copy / "snapshots").glob("row-*.json"):
            if int(file.stem[4:]) > last:
                file.unlink()
        (copy / "snapshots" / NEWEST).write_text(f"row-{last:010}.json")
        with fl.resume(copy, steps=10**9) as resumed:
            assert (resumed.rows[-1]["row"], best_score(copy).row) == (last, row)
            if last == row - 1:
                # A row that never comes gives up what the first run had found.
                resumed._saver.keep(last, resumed._session.kept, at_end=True)
                assert best_score(copy).row == early
                assert equal(load(copy).weights, after[early - 1])
            next(resumed)
        assert best_score(copy).row == best_row(resumed.rows)
        if last != len(rows):
            assert equal(load(copy).weights, after[row - 1])


def test_an_unknown_column_is_an_error_before_the_start(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(fl.errors.SettingError, match="'return_meen'; did you mean 'return_mean'"):
        fl.run(CARTPOLE, out=out, snapshots=fl.Snapshots(best="return_meen"))
    # Only where the graph evaluates.
    with pytest.raises(fl.errors.SettingError, match="unknown column 'eval/return_mean'"):
        fl.run(CARTPOLE, out=out, snapshots=fl.Snapshots(best="eval/return_mean"))
    look = fl.Graph("look", runners=fl.Runners("CartPole-v1", NET))
    look = look.then(sample=fl.ParallelSample(), report=fl.Report())
    with pytest.raises(fl.errors.GraphError, match="0 learners; best='loss' needs exactly one"):
        fl.run(look, out=out, snapshots=fl.Snapshots(best="loss"))
    assert not out.exists()
    with fl.run(look, steps=1, out=out) as run:
        list(run)
    assert not (out / "best").exists()


@pytest.mark.system
def test_a_program_keeps_the_weights_of_the_last_evaluation_that_came_from_the_device(tmp_path):
    graph = fl.ppo(Corridor, SETTINGS).insert(
        after="sample", play=fl.Evaluate(every=2, episodes=20)
    )
    after = []
    with fl.run(graph, steps=64 * 3) as run:
        after.extend(run.policy.weights.params for _ in run)
    with fl.run(graph, runtime=fl.XlaRuntime(chunk=2), out=tmp_path / "run") as run:
        next(run)
        # All four rows came at once; rows 2 and 4 have an evaluation, and that of row 4 is there.
        best = run._saver.best
        assert run._session.pending_rows == 3 and best.score is None
        for _ in range(3):
            next(run)
        assert best.score.row == 4
        assert best.score.value == run.rows[3]["eval/return_mean"]
        for name, x in best.policy.weights.params.items():
            np.testing.assert_allclose(x, after[2][name], rtol=1e-4, atol=1e-6)


@pytest.mark.system
def test_of_many_seeds_it_is_that_of_the_run_that_is_shown(tmp_path):
    graph = fl.ppo(Corridor, SETTINGS).set("learner.optimizer", fl.Adam(0.05))
    with fl.run(
        graph, runtime=fl.XlaRuntime(seeds=2, chunk=1), steps=64 * 5, out=tmp_path / "run"
    ) as run:
        list(run)
    of_runs = np.array([[row["return_mean"] for row in rows] for rows in run.curves().rows])
    shown = of_runs.max(axis=0)
    assert best_score(tmp_path / "run")[1:3] == (shown.max(), int(shown.argmax()) + 1)
    assert load(tmp_path / "run").spaces == run.policy.spaces


def test_the_command_line_has_both_policies(ruined, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = [f"--set={x}" for x in ("envs_per_runner=4", "rollout_length=16", "batch_size=64")]
    words = ["run", "ppo", "--env", "CartPole-v1", *small, "--set=minibatch_size=64"]
    assert main([*words, "--steps", "640", "--out", "here", "--best", "length_mean"]) == 0
    err = capsys.readouterr().err
    score = best_score(tmp_path / "here")
    assert " eval here\n" in err.partition("  last    ")[2][:80]
    best = err.partition("  best    ")[2]
    assert f"eval here --best  (length_mean {score.value:g} in row {score.row}, " in best
    assert main([*words, "--best", "nothing"]) == 2
    assert "best: unknown column 'nothing'" in capsys.readouterr().err
    played = {}
    for which in ((), ("--best",)):
        options = ["--import", "test_best_policy", "--json"]
        assert main(["eval", str(ruined[0]), *which, *options]) == 0
        played[which] = json.loads(capsys.readouterr().out)["mean"]
    assert played["--best",] == 8.0 > 6.0 > played[()]
    taken = []
    monkeypatch.setattr(
        fl.TrainedPolicy, "export", lambda policy, path: taken.append(policy.weights)
    )
    assert main(["export", str(ruined[0]), "--best", "--import", "test_best_policy"]) == 0
    assert equal(taken[0], load(ruined[0]).weights)
