"""Plan: the numbers of a run before it starts; and golden texts.

By these a diff shows what a change did to a stock graph.

`FLOWRL_UPDATE_GOLDEN=1 pytest tests/graph/test_plan.py` writes tests/golden again.
"""

import os
from pathlib import Path

import pytest
from small import AnyAgeLoss, Counter, Pass, SyncEvery, halves, learner, recipe, runners

import flowrl as fl
from flowrl.algos import STOCK

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = {
    "graph": lambda g: f"{g}",
    "plan": lambda g: f"{g.compile()}",
    "drawing": lambda g: g.draw("text"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STOCK)
def test_the_text_of_a_stock_graph_is_the_golden_one(name, kind):
    text, file = KINDS[kind](getattr(fl, name)()), GOLDEN / f"{name}.{kind}.txt"
    if os.environ.get("FLOWRL_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "FLOWRL_UPDATE_GOLDEN=1 writes it again"


def test_there_is_no_golden_text_of_anything_else():
    assert {f.name for f in GOLDEN.iterdir()} == {
        f"{name}.{kind}.txt" for name in STOCK for kind in KINDS
    }


@pytest.mark.parametrize("name", STOCK)
def test_a_golden_graph_is_the_stock_graph(name):
    assert (
        fl.Graph.from_text((GOLDEN / f"{name}.graph.txt").read_text(encoding="utf-8"))
        == getattr(fl, name)()
    )


def test_a_plan_of_two_runners_and_two_rounds_a_batch():
    plan = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            num_runners=2,
            envs_per_runner=8,
            rollout_length=128,
            batch_size=4096,
            minibatch_size=128,
        ),
    ).compile()
    numbers = {
        "requests": 4,
        "sampled_steps": 4096,
        "updates": 1,
        "trained_steps": 4096,
        "used_steps": 40960,
        "gradient_steps": 320,
        "publishes": 1,
        "weight_bytes": 36620,
    }
    assert {name: plan.per_row(name) for name in numbers} == numbers
    assert (
        plan.per_row("sampled_steps", "sample") == 4096
        and plan.per_row("sampled_steps", "train") == 0
    )
    assert plan.lag == 0
    assert str(plan).splitlines() == [
        "ppo: 1 stage, lag 0",
        (
            "  sample   2 runners x 8 envs x 128 steps of CartPole-v1   2,048 steps a call, 2 "
            "calls a row"
        ),
        "  batch    2 -> 1                                          4,096 steps, [128, 32, ...]",
        "  adv      + advantage, target                             float32[128, 32]",
        "  norm     ~ advantage                                     float32[128, 32]",
        (
            "  train    10 epochs x 32 minibatches                      320 gradient steps a row, "
            "each sample used 10 times"
        ),
        "  sync     learner -> runners                              36.6 KB, 1 time a row",
        "  report   every item                                      1 row = 4,096 steps, 1 update",
        "  learner  MLP, PPOLoss, Adam                              one thread",
    ]


def test_weights_are_counted_in_bytes():
    assert recipe().compile().per_row("weight_bytes") == 4 * sum(
        (4 * 8 + 8, 8 * 2 + 2, 4 * 8 + 8, 8 * 1 + 1)
    )


def shown(graph, node):
    (line,) = [x for x in str(graph.compile()).splitlines() if x.split()[0] == node]
    return " ".join(line.split()[1:])


LINES = [
    (
        "an update that may stop early",
        lambda g: g.set("learner.loss.target_kl", 0.01),
        "train",
        "<= 4 gradient steps a row",
    ),
    (
        "one epoch of one minibatch",
        lambda g: g.set("train.epochs", 1).set("train.minibatch_size", None),
        "train",
        "1 epoch x 1 minibatch 1 gradient step a row",
    ),
    (
        "each sample used once",
        lambda g: g.set("train.epochs", 1),
        "train",
        "each sample used 1 time",
    ),
    (
        "a row of several batches",
        lambda g: g.set("report.every", 3),
        "report",
        "every 3 items 1 row = 384 steps, 3 updates",
    ),
    (
        "a row of several batches, sampling",
        lambda g: g.set("report.every", 3),
        "sample",
        "128 steps a call, 3 calls a row",
    ),
    (
        "rows by steps",
        lambda g: g.set("report.every_steps", 300),
        "report",
        "every 3 items 1 row = 384 steps, 3 updates",
    ),
    (
        "weights now and then",
        lambda g: g.set("sync.every", 2).set("learner.loss", AnyAgeLoss()),
        "sync",
        "1 time in 2 rows",
    ),
    (
        "weights for every third of four updates",
        lambda g: g.set("report.every", 4).set("sync.every", 3).set("learner.loss", AnyAgeLoss()),
        "sync",
        "4 times in 3 rows",
    ),
    (
        "what one's own operator asks for",
        lambda g: g.replace(sync=SyncEvery(2)).set("learner.loss", AnyAgeLoss()),
        "sync",
        "publishes 0.5, ",
    ),
    (
        "evaluation",
        lambda g: g.insert(after="sync", eval=fl.Evaluate(every=4, episodes=6)),
        "eval",
        "plays 6 episodes greedily 1 time in 4 rows",
    ),
    (
        "a batch of several rounds",
        lambda g: g.set("batch.batch_size", 300),
        "batch",
        "3 -> 1 384 steps, [16, 24, ...]",
    ),
    (
        "an operator of one's own",
        lambda g: g.insert(after="adv", own=Pass()),
        "own",
        "Pass() 128 steps, [16, 8, ...]",
    ),
    (
        "one after training",
        lambda g: g.insert(after="train", own=Pass()),
        "own",
        "passes updates on",
    ),
    (
        "a map that adds a field",
        lambda g: g.insert(after="adv", own=fl.Map(with_twice)),
        "own",
        "+ twice float32[16, 8]",
    ),
    (
        "a split",
        lambda g: g.set("learner.loss", AnyAgeLoss()).insert(after="adv", own=fl.FlatMap(halves)),
        "own",
        "1 -> 2 64 steps, [16, 4, ...]",
    ),
    (
        "one runner of one environment",
        lambda g: g.replace(runners=runners(num_runners=1, envs_per_runner=1, rollout_length=128)),
        "sample",
        "1 runner x 1 env x 128 steps of CartPole-v1",
    ),
]


def with_twice(batch):
    return batch.with_(twice=batch["reward"] * 2)


@pytest.mark.parametrize(
    ("edit", "node", "text"), [x[1:] for x in LINES], ids=[x[0] for x in LINES]
)
def test_a_line_of_the_plan(edit, node, text):
    assert text in shown(edit(recipe()), node)


def test_the_title_says_periods_in_good_english():
    assert str(recipe().compile()).startswith("g: 1 stage, lag 0\n")
    of_two = recipe().insert(after="sync", own=Counter(lambda n: (n + 1) % 2)).compile()
    assert str(of_two).startswith("g: 1 stage, lag 0, repeats every 2 rows")
    after_three = str(recipe().insert(after="sync", own=Counter(lambda n: min(n + 1, 3))).compile())
    assert "after 3 of warm-up" in after_three and "1 rows" not in after_three


def test_a_plan_keeps_its_graph_and_compares_per_row_with_a_run():
    graph = (
        recipe(learner=learner(AnyAgeLoss()))
        .set("train.minibatch_size", None)
        .set("train.epochs", 1)
        .set("report.every", 2)
    )
    plan = graph.compile()
    assert plan.graph == graph
    with fl.run(graph) as run:
        rows = [next(run), next(run)]
    for name in ("updates", "trained_steps", "gradient_steps"):
        assert rows[1][name] - rows[0][name] == plan.per_row(name)
    counted = {
        k: v
        for c in run._session.place.ledger.counts.values()
        for k, v in c.items()
        if k in ("requests", "sampled_steps")
    }
    assert counted == {k: 2 * plan.per_row(k) for k in counted}


def test_a_graph_that_only_samples_has_a_plan():
    plan = (
        fl.Graph("g", runners=runners())
        .then(sample=fl.ParallelSample(), report=fl.Report(every=3))
        .compile()
    )
    assert plan.lag == 0 and plan.per_row("sampled_steps") == 384 and plan.per_row("updates") == 0
    assert str(plan).splitlines()[2].endswith("1 row = 384 steps, 0 updates")
