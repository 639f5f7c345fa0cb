"""Curves of saved runs: which are a group, what each group is called, and how they are aligned."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl.cli.main import main

LR = fl.ppo("CartPole-v1").text()


def saved(path, rows, text=LR, members=None, **about):
    """A run's directory as far as curves are read from it; rows are (steps, return)."""
    path.mkdir(parents=True)
    (path / "graph.txt").write_text(text)
    facts = {"graph": "ppo", "runtime": "local", "runtime_settings": {}, **about}
    facts = {"ended": {"reason": "steps"}, **facts}
    (path / "run.json").write_text(json.dumps(facts))
    lines = [json.dumps({"env_steps": steps, "return_mean": x}) for steps, x in rows]
    (path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    if members is not None:
        texts = [
            json.dumps({"run": label, "env_steps": steps, "return_mean": x}) + "\n"
            for label, own in members.items()
            for steps, x in own
        ]
        (path / "members.jsonl").write_text("".join(texts))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_put_on_the_steps_of_the_one_that_ends_first(folder):
    saved(folder / "a/seed-0", [(100, None), (200, 10.0), (300, 20.0)], seed=0)
    saved(folder / "a/seed-10", [(90, None), (190, None), (290, 30.0), (390, 50.0)], seed=10)
    saved(folder / "a/seed-2", [(100, 1.0), (250, 4.0), (400, 7.0)], seed=2)
    (folder / "a/notes").mkdir()
    curves = fl.Curves.load("a")
    assert curves.labels == ("a/seed-0", "a/seed-2", "a/seed-10") and set(curves.groups) == {""}
    assert curves.of("env_steps")[""].tolist() == [[100, 200, 300]] * 3
    np.testing.assert_allclose(
        curves.of("return_mean")[""],
        [[np.nan, 10, 20], [1, 3, 5], [np.nan, np.nan, 32]],
    )
    # Early rows in which no episode has ended leave the others as they are.
    mean, low, high = curves.summary()[""]
    assert np.isnan(mean[:2]).all() and low[2] <= mean[2] <= high[2]
    (end,) = curves.ending()
    assert (end["runs"], end["steps"]) == (3, 300)
    assert end["iqm"] == pytest.approx(mean[2]) and end["low"] == pytest.approx(low[2])


INFINITE = math.inf


@pytest.mark.parametrize(
    ("returns", "line"),
    [
        # The middle half lacks the run that is infinite.
        ([1.0, 2.0, 3.0, 4.0, INFINITE], "3              1.6 to inf"),
        ([INFINITE, INFINITE], "inf              inf to inf"),
        ([INFINITE], "inf                       -"),
        ([INFINITE, -INFINITE], "-                       -"),
    ],
)
def test_infinite_values_count_as_such(folder, capsys, returns, line):
    for seed, x in enumerate(returns):
        saved(folder / f"seed-{seed}", [(100, 1.0), (200, x)], seed=seed)
    names = [f"seed-{seed}" for seed in range(len(returns))]
    assert main(["compare", *names, "--picture", "curves.svg"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(line)


def test_a_first_row_at_other_steps_is_no_gap_and_a_long_run_is_thinned(folder):
    saved(folder / "a", [(100, 1.0), (5000, 2.0)], seed=0)
    saved(folder / "b", [(110 + i, 3.0) for i in range(4890)], seed=1)
    curves = fl.Curves.load(["a", "b"])
    assert [len(rows) for rows in curves.rows] == [1000, 1000]
    assert curves.of("return_mean")[""][1, 0] == 3.0
    assert [rows[-1]["env_steps"] for rows in curves.rows] == [4999, 4999]


OTHER = fl.ppo("CartPole-v1").set("learner.optimizer.lr", 1e-3).text()
GAMMAS = fl.ppo("CartPole-v1", gamma=0.9, gae_lambda=0.9).text()
PENDULUM = fl.ppo("Pendulum-v1").text()
DQN = fl.dqn("CartPole-v1").text()


@pytest.mark.parametrize(
    ("runs", "groups"),
    [
        ([(LR, "ppo", 0), (LR, "ppo", 1), (OTHER, "ppo", 0)], ["lr=0.0003"] * 2 + ["lr=0.001"]),
        (
            [(LR, "ppo", 0), (GAMMAS, "ppo", 0)],
            ["gamma=0.99, gae_lambda=0.95", "gamma=0.9, gae_lambda=0.9"],
        ),
        ([(LR, "ppo", 0), (PENDULUM, "ppo", 0)], ["env=CartPole-v1", "env=Pendulum-v1"]),
        ([(LR, "ppo", 0), (DQN, "dqn", 0)], ["ppo", "dqn"]),
        ([(LR, "ppo", 0), (DQN, "dqn", 0), (OTHER, "ppo", 0)],
         ["ppo, lr=0.0003", "dqn", "ppo, lr=0.001"]),
        ([(LR, "ppo", 0), (LR, "ppo", 0)], ["0", "1"]),
        ([("<lambda>", "ppo", 0), ("<other>", "ppo", 0)], ["0", "1"]),
    ],
    ids=["a setting", "two", "environments", "graphs", "both", "equal", "unreadable"],
)  # fmt: skip
def test_a_group_is_called_by_what_differs(folder, runs, groups):
    for i, (text, name, seed) in enumerate(runs):
        saved(folder / str(i), [(10, 1.0)], text=text, graph=name, seed=seed)
    curves = fl.Curves.load([str(i) for i in range(len(runs))])
    assert dict(zip(curves.labels, curves.groups, strict=True)) == dict(
        zip(map(str, range(len(runs))), groups, strict=True)
    )


def test_runs_of_one_directory_stay_together_where_seeds_are_repeated(folder):
    for name in ("before", "after"):
        for seed in (0, 1):
            saved(folder / name / f"seed-{seed}", [(10, 1.0)], seed=seed)
    both = ["before", "before", "after", "after"]
    assert list(fl.Curves.load(["before", "after"]).groups) == both
    each = [f"{name}/seed-{seed}" for name in ("before", "after") for seed in (0, 1)]
    assert list(fl.Curves.load(each).groups) == both
    # Seeds that are not repeated are of one group, wherever they are.
    assert set(fl.Curves.load(["before/seed-0", "after/seed-1"]).groups) == {""}


def test_a_directory_of_many_runs_at_once_is_read_run_by_run(folder):
    members = {
        f"lr={lr}, seed {seed}": [(10, lr), (20, lr + seed)] for lr in (0.1, 0.5) for seed in (3, 4)
    }
    how = {"runtime": "xla", "runtime_settings": {"seeds": "2", "sweep": "Sweep(lr=[0.1, 0.5])"}}
    saved(folder / "x", [(10, 0.0)], members=members, **how)
    curves = fl.Curves.load("x")
    assert curves.groups == ("lr=0.1", "lr=0.1", "lr=0.5", "lr=0.5")
    assert curves.of("return_mean")["lr=0.5"].tolist() == [[0.5, 3.5], [0.5, 4.5]]
    # It is written at the end: before that there are only the means.
    (folder / "x/members.jsonl").unlink()
    with pytest.raises(fl.errors.SaveError, match="x has no rows: its run ended before the first"):
        fl.Curves.load("x")


def swept(**settings):
    """The text of PPO with these settings."""
    return fl.ppo("CartPole-v1", **settings).text()


def test_no_two_groups_have_one_name(folder):
    """Settings that differ beyond the first four, or beyond the cut of a long text, are named."""
    four = {"lr": 0.1, "gamma": 0.9, "gae_lambda": 0.8, "clip_ratio": 0.3}
    wide = [fl.Policy(fl.networks.MLP, hidden=(8,) * 20 + (last,)) for last in (1, 2, 3)]
    many = [
        swept(),
        *(swept(**four, epochs=epochs) for epochs in (2, 3)),
        *(swept(policy=policy) for policy in wide),
        "<one>",
        "<other>",
    ]
    for i, text in enumerate(many):
        saved(folder / f"x/seed-{i}", [(10, float(i))], text=text, seed=0)
    curves = fl.Curves.load("x")
    assert len(set(curves.groups)) == len(many) == len(curves.ending())
    assert [each for each in curves.groups if "epochs=2" in each] == [curves.groups[1]]
    assert curves.groups[-1] == f"{curves.groups[-2]} (2)"


def test_a_sweep_over_values_with_commas_names_them_whole(folder):
    members = {f"hidden=(8, {n}), lr=0.1, seed 0": [(10, 1.0)] for n in (1, 2)}
    saved(folder / "x", [(10, 0.0)], members=members)
    assert fl.Curves.load("x").groups == ("hidden=(8, 1)", "hidden=(8, 2)")


def ended(reason):
    return {"ended": {"reason": reason}}


def test_runs_that_failed_or_stopped_early_do_not_cut_the_others(folder, caplog):
    for seed in (0, 1):
        saved(folder / f"a/seed-{seed}", [(100, 1.0), (200, 2.0)], seed=seed)
    saved(folder / "a/seed-2", [(100, 9.0)], seed=2, **ended("failed"))
    saved(folder / "a/seed-3", [], seed=3, **ended("failed"))
    saved(folder / "a/seed-4", [], seed=4, **ended("interrupted"))
    saved(folder / "a/seed-5", [(100, 9.0)], seed=5, **ended("interrupted"))
    saved(folder / "a/seed-6", [(120, 9.0)], seed=6, ended={})
    # These cut nothing, or next to nothing.
    saved(folder / "a/seed-7", [(100, 1.0), (195, 2.0)], seed=7, **ended("interrupted"))
    saved(folder / "a/seed-8", [(100, 1.0), (900, 2.0)], seed=8, ended={})
    saved(folder / "a/seed-10", [(20, 9.0)], seed=10, **ended("closed"))
    curves = fl.Curves.load("a")
    assert curves.labels == tuple(f"a/seed-{seed}" for seed in (0, 1, 7, 8))
    assert curves.ending()[0]["steps"] == 195
    says = (
        "left out of the curves: a/seed-2 failed; a/seed-3 failed; a/seed-4 has no rows: "
        "its run ended before the first; a/seed-5 was interrupted after 100 steps, before the "
        "others; a/seed-6 goes on or was killed after 120 steps, before the others; a/seed-10 was "
        "closed early after 20 steps, before the others"
    )
    assert [record.message for record in caplog.records] == [says]
    # A run that reached its goal is never too short, but all others are cut.
    saved(folder / "a/seed-9", [(50, 2.0)], seed=9, **ended("until"))
    caplog.clear()
    assert len(fl.Curves.load("a").rows) == 5 + 2
    assert caplog.records[-1].message == (
        "the curves end at 50 steps, where a/seed-9 ends, but half of their runs have 195 "
        "steps or more"
    )
    with pytest.raises(fl.errors.SaveError, match="no run to compare: a/seed-2 failed; a/seed-3"):
        fl.Curves.load(["a/seed-2", "a/seed-3"])


def test_a_run_that_failed_and_was_started_again_is_one_of_its_group(folder):
    saved(folder / "a/seed-0", [(100, 1.0)], seed=0)
    saved(folder / "a/seed-1", [(100, 1.0)], seed=1, **ended("failed"))
    saved(folder / "again", [(100, 1.0)], seed=1)
    assert fl.Curves.load(["a", "again"]).groups == ("", "")


def test_a_directory_that_is_named_twice_is_read_once(folder):
    for seed in (0, 1):
        saved(folder / f"a/seed-{seed}", [(100, 1.0)], seed=seed)
    (folder / "link").symlink_to("a")
    named = ["a", "./a/", "a/seed-0", str(folder / "a"), "link", "a/../a/seed-1"]
    assert fl.Curves.load(named).labels == ("a/seed-0", "a/seed-1")


def test_runs_of_other_runtimes_are_other_groups(folder):
    saved(folder / "a", [(10, 1.0)], seed=0)
    saved(folder / "b", [(10, 1.0)], seed=1, runtime_settings={"schedule": "'random'"})
    saved(folder / "c", [(10, 1.0)], seed=2, runtime="ray")
    assert fl.Curves.load(["a", "b", "c"]).groups == (
        "runtime=local, schedule=none",
        "runtime=local, schedule='random'",
        "runtime=ray, schedule=none",
    )


def damaged(name, text):
    def damage(path):
        (path / name).write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda path: (path / "graph.txt").unlink(),
            "a has no graph.txt and no directories seed-0",
        ),
        (lambda path: (path / "rows.jsonl").unlink(), "a holds no rows.jsonl"),
        (damaged("rows.jsonl", ""), "a has no rows: its run ended before the first"),
        (damaged("rows.jsonl", '{"env_steps": 1}\n{"env_st\n'), "a/rows.jsonl, line 2 is damaged"),
        (damaged("rows.jsonl", "5\n"), "a/rows.jsonl, line 1 is damaged"),
        (damaged("rows.jsonl", '{"return_mean": 1}\n'), "a is damaged: a row has no env_steps"),
        (damaged("run.json", "{"), "a/run.json is damaged"),
        (damaged("run.json", "[]"), "a/run.json is damaged"),
        (damaged("members.jsonl", '{"run": "x", "env_steps": 1}\n'), "'x' names no seed"),
        (damaged("members.jsonl", ""), "a has no rows"),
    ],
)
def test_a_damaged_directory_is_named(folder, damage, says, capsys):
    saved(folder / "a", [(10, 1.0)], seed=0)
    damage(folder / "a")
    assert main(["compare", "a"]) == 2
    assert says in capsys.readouterr().err


def test_what_is_no_directory_or_holds_no_run_is_named(folder, capsys):
    (folder / "empty").mkdir()
    assert main(["compare", "empty"]) == 2
    said = capsys.readouterr().err
    assert "empty has no graph.txt and no directories seed-0" in said and "run --out DIR" in said
    for i in range(6):
        saved(folder / f"many/run-{i}", [(10, 1.0)], seed=i)
    saved(folder / "many/all/seed-0", [(10, 1.0)], seed=0)
    for command in ("compare", "eval", "explain", "why"):
        assert main([command, "many"]) == 2
        wanted = "name what is in it: many/all, many/run-0, many/run-1, many/run-2, many/run-3, and"
        assert f"{wanted} 2 more\n" in capsys.readouterr().err
    assert main(["compare", "nothing"]) == 2
    assert "there is no directory nothing" in capsys.readouterr().err


@pytest.mark.parametrize("order", [["ppo", "dqn"], ["dqn", "ppo"]])
def test_a_column_that_only_some_runs_have_is_found_whatever_their_order(folder, order):
    saved(folder / "ppo", [(10, 1.0)], seed=0)
    saved(folder / "dqn", [(10, 1.0)], text=DQN, graph="dqn", seed=0)
    row = json.loads((folder / "dqn/rows.jsonl").read_text())
    (folder / "dqn/rows.jsonl").write_text(json.dumps({**row, "td_error": 4.0}) + "\n")
    curves = fl.Curves.load(order)
    ends = {end["group"]: end["iqm"] for end in curves.ending("td_error")}
    assert ends["dqn"] == 4.0 and math.isnan(ends["ppo"])
    shown = {line.split()[0]: line.split()[-2:] for line in curves.table("td_error").splitlines()}
    assert shown["dqn"] == ["4", "-"] and shown["ppo"] == ["-", "-"]
    assert "<svg" in curves.svg("td_error")
    with pytest.raises(fl.errors.SaveError, match="unknown column 'td_eror'; did you mean 'td_er"):
        curves.table("td_eror")


def test_half_a_line_at_the_end_of_a_killed_run_is_left_out(folder):
    saved(folder / "a", [(10, 1.0)], seed=0)
    with (folder / "a/rows.jsonl").open("a") as file:
        file.write('{"env_steps": 20, "retu')
    assert len(fl.Curves.load("a").rows[0]) == 1


def test_the_command_prints_a_table_or_json_and_draws(folder, capsys):
    for seed in range(4):
        saved(folder / f"a/seed-{seed}", [(100, None), (200, 10.0 * seed)], seed=seed)
    saved(folder / "b", [(100, 5.0)], text=OTHER, seed=0)
    assert main(["compare", "a", "b", "--picture", "x.svg"]) == 0
    out, err = capsys.readouterr()
    assert err == "the picture is in x.svg\n"
    head, first, second = out.splitlines()
    assert head.split() == [
        "return_mean,",
        "last",
        "row",
        "runs",
        "steps",
        "interquartile",
        "mean",
        "95",
        "%",
        "interval",
    ]
    # The middle half of 0, 10, 20 and 30.
    assert first.split()[:4] == ["lr=0.0003", "4", "200", "15.0"] and " to " in first
    # One run has no interval.
    assert second.split() == ["lr=0.001", "1", "100", "5", "-"]
    drawn = Path("x.svg").read_text()
    assert "<svg" in drawn
    assert main(["compare", "b", "--picture", "x.svg"]) == 2
    assert "x.svg exists already" in capsys.readouterr().err
    with pytest.raises(fl.errors.SaveError, match="x.svg exists already"):
        fl.Curves.load("b").picture("x.svg")
    assert Path("x.svg").read_text() == drawn
    assert main(["compare", "b", "--json", "--column", "env_steps"]) == 0
    end = json.loads(capsys.readouterr().out)
    assert (end["column"], end["iqm"], end["low"], end["runs"]) == ("env_steps", 100, None, 1)
    assert main(["compare", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "b"
    assert main(["compare", "b", "--column", "return"]) == 2
    assert "unknown column 'return'; did you mean 'return_mean'?" in capsys.readouterr().err
    assert math.isnan(fl.Curves.load("b").ending()[0]["high"])


def test_a_run_that_was_stopped_before_it_took_steps_is_left_out(folder, caplog):
    offline = [{"env_steps": 0, "updates": 500 * n, "return_mean": None} for n in (1, 2, 3)]
    online = [
        {"env_steps": 100 * n, "updates": 1_500 + n, "return_mean": 7.0 * n} for n in (1, 2, 3)
    ]
    for seed, rows in enumerate((offline + online, offline + online, offline[:2])):
        reason = "steps" if len(rows) > 2 else "interrupted"
        saved(folder / f"a/seed-{seed}", [], seed=seed, ended={"reason": reason})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"a/seed-{seed}/rows.jsonl").write_text(lines)
    curves = fl.Curves.load("a")
    assert "a/seed-2 was interrupted after 0 steps, before the others" in caplog.text
    (end,) = curves.ending()
    assert (end["runs"], end["steps"], end["iqm"]) == (2, 300, 21.0)
