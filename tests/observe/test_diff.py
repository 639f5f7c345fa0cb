"""Two graphs, their plans and their runs side by side."""

import json

import pytest

import flowrl as fl
from flowrl.cli.main import main
from flowrl.observe.diff import Part, differences
from flowrl.observe.settings import settings_of

PPO_AND_APPO = """\
                                   ppo            appo
nodes: 4 differ, 7 nodes alike
  adv                              Advantages()   -
  norm                             Standardize()  -
  queue                            -              Queue()
  target                           -              UpdateTarget(every=2)
settings: 21 differ, 39 settings alike
  sample.mode                      "sync"         "async"
  batch.batch_size                 1024           500
  train.epochs                     10             1
  train.minibatch_size             128            None
  report.every                     1              10
  runners.num_runners              1              2
  runners.rollout_length           128            50
  learner.loss                     PPOLoss        APPOLoss
  learner.loss.value_clip          None           -
  learner.loss.ent_coef            0.0            0.01
  learner.loss.kl_penalty_target   None           -
  learner.loss.target_kl           None           -
  learner.optimizer.lr             0.0003         0.0005
  learner.optimizer.max_grad_norm  0.5            40.0
  learner.loss.gamma               -              0.99
  learner.loss.vtrace_lambda       -              1.0
  learner.loss.rho_clip            -              1.0
  learner.loss.c_clip              -              1.0
  learner.loss.kl_coef             -              0.0
  learner.loss.standardize         -              False
  learner.loss.target_values       -              False
plan: 8 differ, 1 number alike
  stages                           1              2
  steps a row                      1,024          8,000
  updates a row                    1              10
  steps used a row                 10,240         8,000
  gradient steps a row             80             10
  syncs a row                      1              10
  largest policy lag in lock-step  0              2
  policy lag bound                 0              none
"""


PPO = fl.ppo()
PLAN = PPO.compile()


def part(found, name):
    return next(part for part in found.parts if part.name == name)


def test_ppo_and_appo():
    assert str(fl.diff(PLAN, fl.appo())) == PPO_AND_APPO


def test_equal_graphs_differ_in_nothing():
    found = fl.diff(PLAN, PPO)
    assert not found and str(found).splitlines()[1:] == [
        "nodes: 9 nodes alike",
        "settings: 57 settings alike",
        "plan: 9 numbers alike",
    ]


def test_a_setting_is_reported_by_its_address_wherever_it_stands():
    policy = fl.Policy(fl.networks.MLP, hidden=(8,))
    found = fl.diff(
        PLAN,
        PPO.set("learner.loss.clip_ratio", 0.1)
        .set("runners.policy", policy)
        .set("learner.policy", policy)
        .set("train.minibatch_size", None),
    )
    assert part(found, "settings").lines == (
        ("train.minibatch_size", "128", "None"),
        ("runners.policy.normalize", "False", "-"),
        ("learner.policy.normalize", "False", "-"),
        ("learner.loss.clip_ratio", "0.2", "0.1"),
        ("runners.policy.hidden", "-", "(8,)"),
        ("learner.policy.hidden", "-", "(8,)"),
    )
    assert part(found, "plan").lines == (("gradient steps a row", "80", "10"),) and found


def test_what_only_one_has_moves_nothing_and_what_moved_is_reported():
    assert part(
        fl.diff(PLAN, PPO.remove("norm").insert(after="sync", play=fl.Evaluate())), "nodes"
    ).lines == (
        ("norm", "Standardize()", "-"),
        ("play", "-", "Evaluate()"),
    )
    moved = PPO.remove("norm").insert(after="sample", norm=fl.Standardize())
    assert part(fl.diff(PLAN, moved), "nodes").lines == (
        ("batch", "Concat, after sample", "Concat, after norm"),
        ("norm", "Standardize, after adv", "Standardize, after sample"),
        ("train", "TrainOneStep, after norm", "TrainOneStep, after adv"),
    )
    assert part(fl.diff(PLAN, PPO.replace(batch=fl.Map(len))), "nodes").lines == (
        ("batch", "Concat", "Map"),
    )


def test_the_order_of_nodes_is_reported():
    def branches(*names):
        graph = fl.Graph("g").then(a=fl.Map(abs))
        for name in names:
            graph = graph.then(after="a", **{name: fl.Map(abs)})
        return graph.then(after=("b", "c"), join=fl.Merge())

    one, other = branches("b", "c"), branches("c", "b")
    assert not fl.diff(one, branches("b", "c")) and one != other
    assert fl.diff(one, other).parts[0].lines == (
        ("order of nodes", "a, b, c, join", "a, c, b, join"),
    )


def test_a_graph_that_can_not_run_has_no_plan():
    found = fl.diff(PLAN, PPO.remove("report"))
    assert ("no plan", "-", "ppo.sync: no Report closes a Row, so a run would show not...") in part(
        found, "plan"
    ).lines


def test_long_values_are_cut_and_lines_end_with_no_spaces():
    graph = PPO.set("runners.env_settings", {f"setting_{i}": i for i in range(20)})
    ((_, _, text),) = part(fl.diff(PLAN, graph), "settings").lines
    assert len(text) == 60 and text.endswith("...")
    assert all(line == line.rstrip() for line in str(fl.diff(PLAN, graph)).splitlines())


def test_what_is_no_graph_is_reported():
    with pytest.raises(fl.errors.GraphError, match="diff takes two graphs, got a str"):
        fl.diff(PLAN, "appo")


def test_settings_by_address_are_numbers_where_they_are():
    found = settings_of(PPO)
    assert (
        found["learner.loss.clip_ratio"] == 0.2
        and found["learner.loss"] == "PPOLoss"
        and found["runners.env"] == "CartPole-v1"
    )
    assert found["runners.policy"] == "networks.MLP" and found["runners.wrappers"] == "()"


# -- runs


def left(path, rows, reason=None, end=""):
    path.mkdir()
    (path / "graph.txt").write_text(fl.ppo().text())
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    if reason:
        (path / "events.jsonl").write_text(
            json.dumps({"event": "ended", "reason": reason, "error": None}) + "\n"
        )
    return path


ROWS = [
    {"row": 1, "env_steps": 1000, "seconds": 2.0, "return_mean": None},
    {"row": 2, "env_steps": 2000, "seconds": 4.0, "return_mean": 30.5},
    {"row": 3, "env_steps": 3000, "seconds": 5.0, "return_mean": 20.0},
]


def test_results_of_two_runs(tmp_path):
    one = left(tmp_path / "one", ROWS, "until")
    other = left(
        tmp_path / "other", [*ROWS[:2], {**ROWS[2], "loss": 1.5}], end='{"row": 4, "env_'
    )  # killed while it wrote
    found = fl.diff(PLAN, PLAN, ("one", "other"), (one, other))
    assert part(found, "results") == Part(
        "results", "result", (("ended", "until", "not recorded"), ("last loss", "-", "1.5")), 6
    )
    assert str(found).splitlines()[0] == "             one    other"
    # One that was resumed after its end, and killed.
    with (one / "events.jsonl").open("a") as events:
        events.write('{"event": "started"}\n')
    again = fl.diff(PLAN, PLAN, ("one", "other"), (one, other))
    assert [line[0] for line in part(again, "results").lines] == ["last loss"]


def test_a_damaged_or_missing_file_is_reported(tmp_path):
    bad = left(tmp_path / "bad", ROWS, end="{\n{}\n")
    with pytest.raises(fl.errors.SaveError, match=r"rows\.jsonl, line 4 is damaged"):
        fl.diff(PLAN, PLAN, results=(None, bad))
    with pytest.raises(
        fl.errors.SaveError, match=r"holds no rows\.jsonl: it is no run's directory"
    ):
        fl.diff(PLAN, PLAN, results=(tmp_path, None))


# -- the command line


def test_names_settings_and_directories_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with fl.run(fl.pg("CartPole-v1"), steps=1, out="run") as run:
        list(run)
    assert main(["diff", "pg", "pg", "--untuned", "--set", "lr=0.5"]) == 0
    assert "\n  learner.optimizer.lr" in (text := capsys.readouterr().out) and text.count("\n") == 5
    (tmp_path / "compared.py").write_text(
        "import flowrl as fl\n\ndef mine(env='CartPole-v1'):\n    return fl.pg(env)\n"
    )
    assert main(["diff", "run", "compared.py:mine"]) == 0
    text = capsys.readouterr().out
    assert "settings: 53 settings alike" in text and "last env_steps" in text
    assert f"  last env_steps         {run.rows[-1]['env_steps']:,}" in text
    assert main(["diff", "pg", "apg"]) == 2
    assert "unknown graph 'apg'" in capsys.readouterr().err


def test_differences_are_plain_data_about_nodes_settings_and_edges():
    one = fl.ppo("CartPole-v1")
    other = one.set("learner.loss.clip_ratio", 0.1).insert(after="batch", queue=fl.Queue(2))
    found = differences(one, other)
    assert found == json.loads(json.dumps(found))
    (after,) = [node.name for node in one.nodes if "batch" in node.after]
    assert found == {
        "nodes": [{"name": "queue", "change": "added", "one": "-", "other": "Queue(capacity=2)"}],
        "settings": [{"address": "learner.loss.clip_ratio", "one": "0.2", "other": "0.1"}],
        "edges": [
            {"from": "batch", "to": after, "change": "removed"},
            {"from": "batch", "to": "queue", "change": "added"},
            {"from": "queue", "to": after, "change": "added"},
        ],
    }
    back = differences(other, one)
    assert [node["change"] for node in back["nodes"]] == ["removed"]
    swapped = one.replace(batch=fl.Map(len))
    assert [node["change"] for node in differences(one, swapped)["nodes"]] == ["changed"]
    assert differences(one, one) == {"nodes": [], "settings": [], "edges": []}
