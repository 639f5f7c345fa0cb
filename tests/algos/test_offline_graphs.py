"""Graphs that learn from a dataset: their plans, runs, snapshots and goals."""

import json
import math
import re

import numpy as np
import pytest

import flowrl as fl
from conftest import RAY, ended, same, timeless, with_system
from flowrl.cli.main import main
from flowrl.errors import CheckError, GraphError, SaveError, SettingError
from flowrl.observe.progress import line, result
from test_resuming import cut, resumed, rows_of, values, whole

SMALL = {"batch_size": 16, "evaluate_every": 4, "episodes": 2, "report_every": 2}
QUICK = {**SMALL, "envs_per_runner": 2}
IQL = fl.Policy(fl.networks.IQLNetwork, hidden=(8,))
SAC = fl.Policy(fl.networks.SACNetwork, hidden=(8,))


def writing(env, path):
    settings = fl.PGSettings(num_runners=2, envs_per_runner=2, rollout_length=32, batch_size=128)
    return fl.write_dataset(fl.pg(env, settings), str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    for env, name in (("CartPole-v1", "cart"), ("Pendulum-v1", "pendulum")):
        ended(writing(env, folder / name), 4)
    return folder


GRAPHS = {
    "bc": lambda folder: fl.bc(data=f"{folder}/cart", hidden=(8,), **QUICK),
    "bc of few steps": lambda folder: fl.bc(
        data=f"{folder}/cart", hidden=(8,), buffer_size=64, **QUICK
    ),
    "marwil": lambda folder: fl.marwil(data=f"{folder}/cart", hidden=(8,), **QUICK),
    "iql": lambda folder: fl.iql(data=f"{folder}/pendulum", policy=IQL, **QUICK),
    "cql": lambda folder: fl.cql(data=f"{folder}/pendulum", policy=SAC, actions=2, **QUICK),
}


@pytest.mark.system
@pytest.mark.parametrize("name", GRAPHS)
def test_the_plan_equals_what_is_counted_and_nothing_is_sampled(name, folder):
    graph = GRAPHS[name](folder)
    run, plan = ended(graph, 4), graph.compile()
    counted = run.counts()
    for counter in ("updates", "trained_steps", "gradient_steps", "publishes", "draws"):
        assert counted[counter] == 4 * plan.per_row(counter), counter
    assert counted["evaluations"] == 2 and counted["sampled_steps"] == 0
    assert run.audit().closed and "data of any age" in str(plan)
    row = run.rows[-1]
    assert (row["env_steps"], row["episodes"], row["updates"]) == (0, 0, 8)
    assert math.isnan(row["return_mean"]) and math.isnan(row["lag_max"])
    assert math.isfinite(row["eval/return_mean"]) and math.isfinite(row["loss"])


@pytest.mark.ray
@pytest.mark.parametrize("name", GRAPHS)
def test_ray_gives_what_local_gives(name, folder, ray_up):
    graph = GRAPHS[name](folder)
    local, on_ray = ended(graph, 3), ended(graph, 3, RAY)
    assert timeless(local.rows) == timeless(on_ray.rows)
    assert same(local.policy.weights, on_ray.policy.weights)


def test_a_program_of_xla_refuses_it_with_the_reason(folder):
    graph = fl.bc("gymnax:CartPole-v1", data=f"{folder}/cart", **QUICK).set(
        "dataset.check_env", False
    )
    with pytest.raises(fl.errors.FlowrlError, match="dataset"):
        fl.run(graph, runtime="xla")


@pytest.mark.parametrize(
    "name", with_system(["bc", "bc of few steps", "marwil", "cql"], {"marwil", "cql"})
)
def test_a_run_that_is_cut_goes_on_bit_for_bit(name, folder, tmp_path):
    graph = GRAPHS[name](folder)
    run = whole(graph, tmp_path / "whole")
    again, new = resumed(cut(tmp_path / "whole", 3, tmp_path / "cut"), graph)
    assert len(new) == 2 and rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert same(values(again.policy.weights), values(run.policy.weights))


def test_a_run_that_writes_is_cut_and_writes_the_same_again(tmp_path):
    graph = writing("CartPole-v1", tmp_path / "data")
    whole(graph, tmp_path / "whole")
    first = contents(tmp_path / "data")
    resumed(cut(tmp_path / "whole", 3, tmp_path / "cut"), graph)
    again = contents(tmp_path / "data")
    assert first.keys() == again.keys()
    for name, x in first.items():
        np.testing.assert_array_equal(x, again[name])


def contents(path):
    import h5py

    found = {}
    with h5py.File(path / "data" / "main_data.hdf5") as file:
        file.visititems(
            lambda name, x: found.update({name: x[()]}) if hasattr(x, "shape") else None
        )
    return found


def test_what_is_written_is_what_the_runners_sampled(tmp_path):
    plain = ended(fl.pg("CartPole-v1", batch_size=128, envs_per_runner=2, rollout_length=32), 4)
    graph = fl.write_dataset(plain.graph, str(tmp_path / "data"))
    run = ended(graph, 4)
    assert timeless(run.rows) == timeless(plain.rows)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["steps"] == run.rows[-1]["env_steps"] and manifest["env"] == "CartPole-v1"
    assert manifest["episodes"] - len(manifest["cut_episodes"]) == run.rows[-1]["episodes"]
    assert run.audit().closed and "0 held" not in str(run.audit())


def test_runners_on_the_device_are_written_too(tmp_path):
    graph = fl.pg("gymnax:CartPole-v1", batch_size=128, envs_per_runner=2, rollout_length=32)
    run = ended(fl.write_dataset(graph, str(tmp_path / "data")), 2)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["steps"] == run.rows[-1]["env_steps"] and run.audit().closed


def test_experience_of_several_agents_is_refused(tmp_path):
    graph = fl.ppo("pettingzoo:classic.tictactoe_v3")
    with pytest.raises(CheckError, match="whose turns no dataset holds; make them one agent"):
        fl.write_dataset(graph, str(tmp_path / "data")).compile()


def test_a_number_of_steps_is_no_goal_of_a_graph_that_takes_none(folder, tmp_path):
    graph = GRAPHS["bc"](folder)
    with pytest.raises(SettingError, match=r"no node of bc samples .*row\['updates'\] >= 10_000"):
        fl.run(graph, steps=100)
    with fl.run(graph, until=lambda row: row["updates"] >= 6, out=tmp_path / "run") as run:
        assert len(list(run)) == 3 and run.reason == "until"
    with pytest.raises(SettingError, match=r"its goal after 6 updates; .*'updates>=12'"):
        fl.resume(tmp_path / "run", graph, until=lambda row: row["updates"] >= 6)


@pytest.mark.parametrize("column", ["env_steps", "episodes", "return_mean", "length_mean"])
def test_a_goal_that_no_row_without_steps_reaches_is_refused(column, folder, capsys):
    graph = GRAPHS["bc"](folder)
    says = rf"'{column}>=5': no node of bc samples .* so {column} is (0|nan) in every row; let it"
    with pytest.raises(SettingError, match=f"until {says}.*, or its evaluations: 'eval/return_mea"):
        fl.run(graph, until=f"{column}>=5")
    with pytest.raises(SettingError, match=f"until {says}.*'updates>=10_000'$"):
        fl.run(graph.remove("evaluate"), until=f"{column}>=5")
    command = ["run", "bc", "--env", "CartPole-v1", "--set", f"data={folder}/cart"]
    assert main([*command, "--until", f"{column}>=5"]) == 2
    assert re.search(f"--until {says}", capsys.readouterr().err)


def test_a_goal_that_a_graph_without_steps_reaches_is_taken(folder):
    for goal in ("env_steps<=0", "updates>=2", "eval/return_mean>=1"):
        with fl.run(GRAPHS["bc"](folder), until=goal) as run:
            assert len(list(run)) <= 2 and run.reason == "until"


def test_progress_is_that_of_updates(folder):
    row = ended(GRAPHS["bc"](folder), 2).rows[-1]
    assert "         4 updates  return" in line(row, None) and "updates/s" in line(row, None)
    assert "4 updates in" in result("until", "updates>=4", row)


def test_curves_are_drawn_over_updates(folder):
    runs = [ended(GRAPHS["bc"](folder), 2) for _ in range(2)]
    curves = fl.Curves(("a", "b"), ("", ""), tuple(tuple(run.rows) for run in runs))
    assert curves.ending("loss")[0]["steps"] == 4 and "updates" in curves.svg("loss")


def test_a_policy_is_saved_loaded_and_plays(folder, tmp_path):
    with fl.run(GRAPHS["bc"](folder), until=lambda r: True, out=tmp_path / "run") as run:
        list(run)
    assert np.shape(fl.load(tmp_path / "run").evaluate(2)) == (2,)


def test_the_command_line_trains_repeats_and_plays_one(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["batch_size=16", "report_every=2", "evaluate_every=2", "episodes=2", "hidden=(8,)"]
    words = [word for setting in (f"data={folder}/cart", *small) for word in ("--set", setting)]
    goal = ["--until", "updates>=4"]
    assert main(["run", "bc", "--env", "CartPole-v1", *words, *goal, "--out", "first"]) == 0
    said = capsys.readouterr().err
    assert "solved: updates>=4 after 4 updates" in said and "0 steps" not in said
    assert main(["run", "first", "--out", "second"]) == 0
    assert rows_of(tmp_path / "first") == rows_of(tmp_path / "second")
    assert main(["eval", "second", "--episodes", "2"]) == 0
    assert "updates/s" in (tmp_path / "first" / "explain.txt").read_text()
    assert main(["run", "bc", *words, "--steps", "10"]) == 2
    assert "no node of bc samples" in capsys.readouterr().err


def test_a_graph_is_planned_without_its_dataset_and_a_run_names_what_is_missing():
    graph = fl.bc(data="nowhere")
    assert "256 transitions from dataset   100 batches a row" in str(graph.compile())
    with pytest.raises(SaveError, match="nowhere is not there, so it is no dataset"):
        fl.run(graph)


def test_mistakes_are_found_before_a_run():
    with pytest.raises(CheckError, match=r"bc\.dataset: no node uses it"):
        fl.bc().replace(read=fl.ParallelSample()).compile()
    graph = fl.bc().set("learner.loss", fl.losses.PPOLoss())
    with pytest.raises(CheckError, match="PPOLoss needs the fields? .*, but the batch has obs"):
        graph.compile()
    with pytest.raises(GraphError, match="write_dataset needs one ParallelSample, got none"):
        fl.write_dataset(fl.bc(), "x")
    with pytest.raises(CheckError, match=r"learner: IQLLoss needs a policy"):
        fl.iql("CartPole-v1", policy=fl.Policy(fl.networks.MLP)).compile()


def online(folder, updates):
    offline = fl.iql(data=f"{folder}/pendulum", policy=IQL, **QUICK)
    nodes = {node.name: node.op for node in offline.set("runners.rollout_length", 4).nodes}
    resources = dict(offline.set("runners.rollout_length", 4).resources)
    return (
        fl.Graph("phases", replay=fl.Replay(100), **resources)
        .then(sample=fl.ParallelSample(), add=fl.ReplayAdd())
        .then(fresh=fl.ReplaySample(16, learning_starts=32, updates_per_step=0.75))
        .then(after=(), demo=fl.ReadDataset(16))
        .then(after=("fresh", "demo"), mix=fl.Merge({"fresh": 3, "demo": 1}))
        .then(after=(), read=fl.ReadDataset(16))
        .then(after=("read", "mix"), phase=fl.Switch({"read": updates, "mix": None}, "runners"))
        .then(train=nodes["train"], target=nodes["target"], sync=fl.SyncWeights())
        .then(report=fl.Report(every=4))
    )


@pytest.mark.system
def test_offline_comes_first_and_then_online_with_demonstrations_mixed_in(folder, tmp_path):
    graph = online(folder, 10)
    plan = graph.compile()
    assert plan.found.exact and plan.found.idle_steps == 0
    assert (plan.per_row("updates"), plan.per_row("sampled_steps")) == (4, 4)
    assert plan.per_row("draws", "fresh") == 3 * plan.per_row("draws", "demo") == 3
    run = whole(graph, tmp_path / "whole", 7)
    steps = [row["env_steps"] for row in run.rows]
    assert steps[:2] == [0, 0] and steps[2] >= 32 and steps[-1] > steps[2]
    assert run.audit().closed
    # Some that were read wait for their turn.
    assert run.counts()["draws"] >= 7 * 4
    resumed(cut(tmp_path / "whole", 4, tmp_path / "cut"), graph, 7)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    with fl.run(graph, steps=40) as run:
        assert list(run)[-1]["env_steps"] >= 40


def test_a_phase_may_be_the_only_one_that_reads_a_dataset_or_samples_from_a_replay(folder):
    # Whatever the steady period lacks was done before it.
    graph = online(folder, 5).remove("demo").replace(mix=fl.Map(lambda item: item))
    graph = graph.set("phase.items", {"read": 5, "mix": None})
    plan = graph.compile()
    assert plan.found.exact and not plan.per_row("draws", "read")
    assert plan.per_row("draws", "fresh") == 4
    with fl.run(graph, steps=40) as run:
        assert list(run)[-1]["env_steps"] >= 40
        assert run.counts()["draws"] > 5
    never = graph.remove("read").replace(phase=fl.Map(lambda item: item))
    with pytest.raises(CheckError, match=r"dataset: no node uses it"):
        never.compile()


def test_a_learner_may_be_trained_in_an_early_phase_alone():
    cloning = fl.bc("CartPole-v1", data="nowhere", hidden=(4,))
    resources = dict(cloning.resources)
    graph = fl.Graph("two", first=resources["learner"], **resources)
    graph = graph.then(read=fl.ReadDataset(8), pre=fl.TrainOneStep(learner="first"))
    graph = graph.then(after=(), more=fl.ReadDataset(4), train=fl.TrainOneStep())
    phases = fl.Switch({"pre": 5, "train": None})
    graph = graph.then(after=("pre", "train"), phase=phases, sync=fl.SyncWeights())
    plan = graph.then(report=fl.Report()).compile()
    assert plan.found.exact and plan.counts("pre")["updates"] == 0
    with pytest.raises(CheckError, match=r"two\.third: no node"):
        fl.Graph("two", third=resources["learner"], **graph.resources).then(
            **{n.name: n.op for n in cloning.nodes}
        ).compile()


@pytest.mark.parametrize(("goal", "read"), [(-1e6, 3), (0.0, 10)])
def test_a_phase_ends_with_a_return_or_after_its_most_items(goal, read, folder, tmp_path):
    end = fl.UntilReturn(goal, within=10, every=3, episodes=2)
    graph = online(folder, end).set("phase.items", {"read": end, "mix": None})
    plan = graph.compile()
    assert plan.found.exact and "<= 10 of read until it returns" in str(plan)
    run = whole(graph, tmp_path / "whole", 7)
    played = [row["eval/return_mean"] for row in run.rows if "eval/return_mean" in row]
    assert all(x < 0 for x in played) and run.audit().closed
    assert run.counts()["evaluations"] == (1 if read == 3 else 3)
    (edge,) = [e for e in run.audit().edges if (e.before, e.after) == ("read", "phase")]
    assert edge.got.items == read
    resumed(cut(tmp_path / "whole", 2, tmp_path / "cut"), graph, 7)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_whoever_waits_for_a_return_names_who_plays():
    with pytest.raises(SettingError, match='add runners="runners"'):
        fl.Switch({"read": fl.UntilReturn(0.0, within=5), "mix": None})
    with pytest.raises(SettingError, match="within must be at least 1, got 0"):
        fl.UntilReturn(0.0, within=0)


def test_a_run_of_phases_begins_long_before_it_samples_and_is_planned_at_once(folder):
    assert online(folder, 1_000_000).compile().found.exact
