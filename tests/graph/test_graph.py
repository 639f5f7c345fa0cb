"""Graph: every verb gives a new graph, mistakes are reported, and its text leads back to it."""

import enum
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import POLICY, Counter, Merge, Pass, learner, recipe, runners, same

import flowrl as fl
from flowrl.graph.values import named

C = fl.Concat
OWN = ("small", "test_graph", "builtins")
STOCK = {name: getattr(fl, name)() for name in ("ppo", "a2c", "pg")}


def edges(graph):
    return {n.name: n.after for n in graph.nodes}


def abc():
    return fl.Graph("g").then(a=C(1), b=C(2), c=C(3))


def fork():
    """a -> b -> d, a -> c -> d, d -> e."""
    return (
        fl.Graph("g")
        .then(a=C(1), b=C(2))
        .then(after="a", c=C(3))
        .then(after=("b", "c"), d=Merge(), e=C(4))
    )


def reread(graph):
    return fl.Graph.from_text(graph.text(), allow=(*OWN, "optax"))


# -- building and editing


def test_then_continues_the_open_end():
    assert edges(abc().then(d=C(4))) == {"a": (), "b": ("a",), "c": ("b",), "d": ("c",)}


def test_then_after_a_name_branches_and_after_several_joins():
    assert edges(fork()) == {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ("d",)}
    assert fork().ends() == ["e"]


def test_then_after_nothing_starts_a_new_root():
    graph = abc().then(after=(), x=C(1), y=C(1))
    assert edges(graph)["x"] == () and edges(graph)["y"] == ("x",)
    assert graph.ends() == ["c", "y"]


def test_after_takes_any_iterable_of_names():
    assert edges(fork().then(after=(n for n in ("b", "c")), x=C(1)))["x"] == ("b", "c")


def test_the_same_predecessor_named_twice_is_one_edge():
    assert edges(abc().then(after=("c", "c"), x=C(1)))["x"] == ("c",)


def test_a_chain_nests_under_its_name():
    inner = fl.chain(x=C(1), deep=fl.chain(y=C(2), z=C(3)))
    graph = fl.Graph("g").then(a=inner, b=C(4))
    assert edges(graph) == {
        "a.x": (),
        "a.deep.y": ("a.x",),
        "a.deep.z": ("a.deep.y",),
        "b": ("a.deep.z",),
    }
    assert list(inner) == ["x", "deep.y", "deep.z"] and len(inner) == 3 and inner["deep.y"] == C(2)


def test_insert_takes_over_all_out_edges():
    assert edges(fork().insert(after="a", x=C(7), y=C(8))) == {
        "a": (),
        "x": ("a",),
        "y": ("x",),
        "b": ("y",),
        "c": ("y",),
        "d": ("b", "c"),
        "e": ("d",),
    }
    assert edges(fork().insert(after="b", x=C(7)))["d"] == ("x", "c")
    assert edges(abc().insert(after="c", x=fl.chain(y=C(1)))) == {
        "a": (),
        "b": ("a",),
        "c": ("b",),
        "x.y": ("c",),
    }


def test_move_lets_a_node_go_on_from_others():
    assert (
        edges(fork().move("c", after="b"))["c"] == ("b",)
        and edges(fork().move("d", after=()))["d"] == ()
    )
    assert edges(fork().move("e", after=("b", "c")))["e"] == ("b", "c")
    for place in ("d", "e", "b"):
        with pytest.raises(
            fl.errors.GraphError,
            match=f"'b' can't go on from '{place}', which does not stand before it",
        ) as caught:
            fork().move("b", after=place)
        # A node can't stand after itself, so there is no way out to name.
        way = f"graph.remove('b').insert(after='{place}', b=...)"
        assert (way in str(caught.value)) == (place != "b")
    alone = fork().remove("b").insert(after="d", b=C(2))
    assert edges(alone)["b"] == ("d",)


def test_remove_joins_every_predecessor_to_every_successor():
    graph = fork().then(after="d", f=C(5))
    assert edges(graph.remove("d")) == {
        "a": (),
        "b": ("a",),
        "c": ("a",),
        "e": ("b", "c"),
        "f": ("b", "c"),
    }
    assert edges(graph.remove("a")) == {"b": (), "c": (), "d": ("b", "c"), "e": ("d",), "f": ("d",)}
    assert edges(graph.remove("b", "c"))["d"] == ("a",)
    assert edges(abc().remove("a", "b", "c")) == {}


def test_remove_takes_resources_too():
    assert list(recipe().remove("learner", "adv").resources) == ["runners"]


def test_replace_puts_operators_and_resources_in_place():
    graph = recipe().replace(batch=C(7), learner=learner(fl.losses.PGLoss()))
    assert graph.nodes[1].op == C(7) and graph.nodes[1].after == ("sample",)
    assert graph.resources["learner"].loss == fl.losses.PGLoss()
    nested = fl.Graph("g").then(a=fl.chain(x=C(1), y=C(2)))
    assert nested.replace(**{"a.y": C(9)}).nodes[1].op == C(9)


def test_rename_keeps_everything_else():
    graph = recipe().rename("other")
    assert (
        graph.name == "other"
        and graph.nodes == recipe().nodes
        and graph.resources == recipe().resources
    )


@pytest.mark.parametrize(
    ("address", "value", "got"),
    [
        ("train.epochs", 4, lambda g: g.nodes[4].op.epochs),
        ("train.minibatch_size", None, lambda g: g.nodes[4].op.minibatch_size),
        ("learner.loss.clip_ratio", 0.3, lambda g: g.resources["learner"].loss.clip_ratio),
        ("learner.loss", fl.losses.PGLoss(), lambda g: g.resources["learner"].loss),
        (
            "learner.optimizer.lr",
            fl.Linear(1.0, 0.0, 10),
            lambda g: g.resources["learner"].optimizer.lr,
        ),
        (
            "runners.policy.hidden",
            (3, 3),
            lambda g: g.resources["runners"].policy.settings["hidden"],
        ),
        (
            "runners.policy.activation",
            "relu",
            lambda g: g.resources["runners"].policy.settings.get("activation"),
        ),
        ("runners.env_settings", {"a": 1}, lambda g: g.resources["runners"].env_settings),
        ("sync.learner", "other", lambda g: g.nodes[5].op.learner),
    ],
)
def test_set_changes_one_setting_by_its_address(address, value, got):
    before = recipe()
    after = before.set(address, value)
    assert got(after) == value != got(before)
    assert before == recipe() and after != before


def test_set_reaches_into_nested_chains():
    graph = fl.Graph("g").then(a=fl.chain(adv=C(1)), b=fl.Advantages())
    assert graph.set("a.adv.batch_size", 5).nodes[0].op == C(5)
    longer = fl.Graph("g").then(a=fl.chain(b=C(1), bb=C(2)))
    assert [n.op.batch_size for n in longer.set("a.bb.batch_size", 9).nodes] == [1, 9]


def test_set_gives_the_type_that_the_field_is_annotated_with():
    lr = recipe().set("learner.optimizer.lr", 1).resources["learner"].optimizer.lr
    assert lr == 1.0 and isinstance(lr, float)
    assert recipe().set("runners.wrappers", [same]).resources["runners"].wrappers == (same,)


@pytest.mark.parametrize(
    "number", [np.float64(0.001), np.float32(0.001), np.int64(1)], ids=lambda n: type(n).__name__
)
def test_a_numpy_number_is_set_as_a_plain_one(number):
    """Sweeps come from np.logspace; what they set must print and load."""
    graph = recipe().set("learner.optimizer.lr", number)
    assert type(graph.resources["learner"].optimizer.lr) is float
    assert reread(graph) == graph


VERBS = {
    "then": lambda g: g.then(x=C(1)),
    "branch": lambda g: g.then(after="adv", x=C(1)),
    "insert": lambda g: g.insert(after="adv", x=C(1)),
    "remove": lambda g: g.remove("adv", "learner"),
    "replace": lambda g: g.replace(adv=C(1), learner=runners()),
    "rename": lambda g: g.rename("x"),
    "set": lambda g: g.set("learner.loss.clip_ratio", 0.5),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_leaves_the_old_graph_alone(verb):
    graph, text = recipe(), recipe().text()
    new = VERBS[verb](graph)
    assert new is not graph and new != graph
    assert graph == recipe() and graph.text() == text


# -- mistakes, reported


MISTAKES = [
    (
        "a name taken by a node",
        lambda g: g.then(sample=C(1)),
        "g: the name 'sample' is taken by a node; nodes and resources share one namespace",
    ),
    (
        "a name taken by a resource",
        lambda g: g.then(learner=C(1)),
        "g: the name 'learner' is taken by a resource",
    ),
    (
        "a name inserted twice",
        lambda g: g.insert(after="adv", train=C(1)),
        "the name 'train' is taken by a node",
    ),
    (
        "a name twice in a chain",
        lambda g: g.then(**{"a.b": C(1)}).then(a=fl.chain(b=C(1))),
        "the name 'a.b' is taken by a node",
    ),
    (
        "a class for an operator",
        lambda g: g.then(x=fl.Concat),
        "'x' must be an operator or a chain, got the class itself: call it",
    ),
    (
        "a resource for an operator",
        lambda g: g.then(x=learner()),
        r"'x' must be an operator or a chain, got a Learner.*fl\.Graph\(",
    ),
    (
        "a number for an operator",
        lambda g: g.then(x="3"),
        "'x' must be an operator or a chain, got a str",
    ),
    (
        "an operator for a resource",
        lambda g: fl.Graph("h", x=C(1)),
        r"h: 'x' must be a resource .* got a Concat; operators go into \.then\(",
    ),
    (
        "a class for a resource",
        lambda g: fl.Graph("h", x=fl.Learner),
        r"h: 'x' must be a resource .* the class itself: call it",
    ),
    ("nothing added", lambda g: g.then(), "g: needs at least one operator"),
    ("nothing inserted", lambda g: g.insert(after="adv"), "g: needs at least one operator"),
    ("nothing chained", lambda g: fl.chain(), "chain: needs at least one operator"),
    (
        "a number chained",
        lambda g: fl.chain(x="3"),
        "chain: 'x' must be an operator or a chain, got a str",
    ),
    (
        "after an unknown name",
        lambda g: g.then(after="tran", x=C(1)),
        "unknown node 'tran'; did you mean 'train'?",
    ),
    (
        "after one unknown of two",
        lambda g: g.then(after=("train", "batsh"), x=C(1)),
        "unknown node 'batsh'; did you mean 'batch'?",
    ),
    ("after a resource", lambda g: g.then(after="learner", x=C(1)), "'learner' is a resource"),
    (
        "several open ends",
        lambda g: g.then(after="adv", x=C(1)).then(y=C(1)),
        r"there are 2 open ends \(report, x\).*then\(after='x', \.\.\.\)",
    ),
    (
        "insert after an unknown",
        lambda g: g.insert(after="trai", x=C(1)),
        "unknown node 'trai'; did you mean 'train'?",
    ),
    (
        "remove an unknown",
        lambda g: g.remove("repot"),
        "unknown node .*'repot'; did you mean 'report'?",
    ),
    (
        "remove an unknown resource",
        lambda g: g.remove("lerner"),
        "'lerner'; did you mean 'learner'?",
    ),
    ("replace an unknown", lambda g: g.replace(trian=C(1)), "'trian'; did you mean 'train'?"),
    (
        "replace an unknown resource",
        lambda g: g.replace(lerner=learner()),
        "'lerner'; did you mean 'learner'?",
    ),
    (
        "an operator replaced by a resource",
        lambda g: g.replace(train=learner()),
        "'train' is an operator and can't be replaced by a Learner",
    ),
    (
        "a resource replaced by an operator",
        lambda g: g.replace(learner=C(1)),
        "'learner' is a resource and can't be replaced by a Concat",
    ),
    (
        "replaced by a class",
        lambda g: g.replace(train=fl.TrainOneStep),
        "'train' is an operator .* the class itself: call it",
    ),
    ("a name that no text can hold", lambda g: g.then(**{"two words": C(1)}), "'two words'"),
]


@pytest.mark.parametrize(
    ("build", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_in_a_verb_is_reported(build, message):
    with pytest.raises(fl.errors.GraphError, match=message):
        build(recipe())


BAD_SETTINGS = [
    ("train", 3, "g.train: say which setting of it: train.epochs"),
    ("train.epoch", 3, "g.train: unknown setting 'epoch'; did you mean 'epochs'"),
    ("epochs", 3, "g: unknown node or resource 'epochs'; did you mean train.epochs? Known: run"),
    ("tran.epochs", 3, "g: unknown node or resource 'tran'; did you mean 'train'"),
    ("lerner.loss", 3, "g: unknown node or resource 'lerner'; did you mean 'learner'"),
    ("train.epochs", "3", "g.train.epochs: takes a whole number, got '3'"),
    ("train.epochs", 2.5, "g.train.epochs: takes a whole number, got 2.5"),
    ("train.epochs", True, "g.train.epochs: takes a whole number, got True"),
    ("train.epochs", 0, "g.train: epochs must be at least 1, got 0"),
    (
        "train.minibatch_size",
        "all",
        "g.train.minibatch_size: takes a whole number or None, got 'all'",
    ),
    ("learner.loss.clip_ratio", "wide", "g.learner.loss.clip_ratio: takes a number, got 'wide'"),
    ("learner.loss.clip_ratio", -1, "g.learner.loss: clip_ratio must be above 0, got -1.0"),
    (
        "learner.loss.clop_ratio",
        1,
        "g.learner.loss: unknown setting 'clop_ratio'; did you mean 'clip_ratio'",
    ),
    ("learner.loss.clip_ratio.x", 1, "g.learner.loss.clip_ratio: unknown setting 'x'"),
    ("learner.loss", 3, "g.learner: loss must be one such as"),
    ("runners.policy", 3, "g.runners.policy: takes Policy or Team, got 3"),
    ("runners.polcy.hidden", 3, "g.runners: unknown setting 'polcy'; did you mean 'policy'"),
    ("runners.envs_per_runner", -1, "g.runners: envs_per_runner must be at least 1, got -1"),
    ("sync.learner", 3, "g.sync.learner: takes a text, got 3"),
]


@pytest.mark.parametrize(
    ("address", "value", "message"), BAD_SETTINGS, ids=[f"{a}={v!r}" for a, v, _ in BAD_SETTINGS]
)
def test_a_mistake_in_set_is_reported_with_its_address(address, value, message):
    with pytest.raises(fl.errors.SettingError) as caught:
        recipe().set(address, value)
    assert str(caught.value).startswith(message)


# -- a value


def test_equal_graphs_are_equal_and_hash_alike():
    assert recipe() == recipe() and hash(recipe()) == hash(recipe())
    assert len({recipe(), recipe(), recipe().rename("h")}) == 2
    assert recipe() != "g" and recipe() != recipe().set("train.epochs", 3)
    assert fork() != fl.Graph("g").then(a=C(1), b=C(2), c=C(3), d=Merge(), e=C(4))


def test_graphs_with_resources_in_another_order_hash_alike_if_they_are_equal():
    one, two = (
        fl.Graph("g", **dict(order))
        for order in ([("r", runners()), ("l", learner())], [("l", learner()), ("r", runners())])
    )
    assert one != two or hash(one) == hash(two)


def test_chains_compare_with_their_order():
    assert fl.chain(a=C(1), b=C(2)) == fl.chain(a=C(1), b=C(2))
    assert hash(fl.chain(a=C(1))) == hash(fl.chain(a=C(1)))
    assert fl.chain(a=C(1), b=C(2)) != fl.chain(b=C(2), a=C(1))


@pytest.mark.parametrize(
    "graph", [recipe(), fork(), fl.Graph("empty"), *STOCK.values()], ids=lambda g: g.name
)
def test_a_graph_pickles(graph):
    assert pickle.loads(pickle.dumps(graph)) == graph


def test_a_graph_is_immutable():
    graph = recipe()
    with pytest.raises(AttributeError, match="immutable: its verbs"):
        graph.name = "other"
    with pytest.raises(AttributeError):
        del graph.nodes
    with pytest.raises(TypeError):
        graph.resources["learner"] = learner()
    with pytest.raises(AttributeError):
        graph.nodes[0].name = "other"
    assert graph == recipe()


# -- text and back


def double(x):
    return 2 * x


TEXTS = {
    **STOCK,
    "small": recipe(),
    "nothing": fl.Graph("nothing"),
    "only resources": fl.Graph("g", runners=runners()),
    "fork": fork(),
    "two roots": abc()
    .then(after=(), x=C(1))
    .then(after=("c", "x"), y=Merge())
    .then(after="a", z=C(2)),
    "nested": fl.Graph("g")
    .then(a=fl.chain(x=C(1), b=fl.chain(y=C(2), z=C(3))), c=C(4))
    .then(after="a.b.y", d=fl.chain(x=C(5))),
    "a function": fl.Graph("g").then(
        a=fl.Map(double), b=fl.Filter(bool), c=fl.FlatMap(same), d=Pass()
    ),
    "its own operators": fl.Graph("g").then(a=Counter(double), b=Pass()),
    "infinite": fl.Graph("g", runners=runners(env_settings={"high": math.inf, "low": -math.inf})),
    "strings": fl.Graph(
        "g",
        runners=runners(
            env_settings={
                "a": 'it\'s "so"',
                "b": "two\nlines \\ and a tab\t",
                "c": "ünï ☂ {x}",
                "": "#",
            }
        ),
    ),
    "tuples": fl.Graph(
        "g",
        runners=runners(
            env_settings={
                "a": (),
                "b": (1,),
                "c": (1, (2.5, None), True),
                "d": [1, [2]],
                "e": {"f": {1: -2}},
            }
        ),
    ),
    "optax": fl.Graph(
        "g", learner=learner(optimizer=fl.Optax(named("optax:adamw"), learning_rate=1e-3))
    ),
    "a schedule": fl.Graph(
        "g", learner=learner(optimizer=fl.Adam(fl.Cosine(1e-22, 1e30, 7), max_grad_norm=0.1 + 0.2))
    ),
    "a long line": fl.Graph(
        "g", runners=runners(env_settings={f"setting_{i}": "x" * 40 for i in range(6)})
    ),
    "a name with a quote": fl.Graph('the "best" \\ one'),
    "a chain with something inserted": fl.Graph("g")
    .then(a=fl.chain(x=C(1), y=C(2)))
    .insert(after="a.x", b=C(3)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_graph_leads_back_to_it(name):
    again = reread(TEXTS[name])
    assert again == TEXTS[name]
    assert again.text() == TEXTS[name].text()


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_printed_is_python_that_builds_an_equal_graph(name):
    names = {name: getattr(fl, name) for name in fl.__all__} | {"load": named, "inf": math.inf}
    for text in (repr(TEXTS[name]), TEXTS[name].text()):
        exec(f"graph = {text}", names)
        assert names["graph"] == TEXTS[name]


def test_a_class_of_a_module_that_runs_by_its_name_is_found_again(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/train.py").write_text(
        "from flowrl.graph.names import name_of\n\nclass Net:\n    pass\n\n"
        "if __name__ == '__main__':\n    print(name_of(Net, strict=True))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    for how, module in ((["-m", "pack.train"], "pack.train"), (["pack/train.py"], "train")):
        done = subprocess.run(
            [sys.executable, *how],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == f'load("{module}:Net")\n'


def test_a_chain_under_the_name_of_a_node_is_refused_or_reads_back():
    try:
        graph = (
            fl.Graph("g")
            .then(a=C(1))
            .then(a=fl.chain(x=C(2), y=fl.chain(z=C(3))))
            .then(**{"a.y.z.w": C(4)})
        )
    except fl.errors.GraphError as error:
        assert "'a" in str(error)  # noqa: PT017 - either way is good
    else:
        assert reread(graph) == graph and len(graph.nodes) == 4


def test_nan_survives_the_text():
    # The settings of flowrl's own classes refuse it.
    graph = recipe().set("learner.optimizer", fl.Optax(optax.sgd, learning_rate=math.nan))
    assert "learning_rate=nan" in graph.text()
    found = fl.Graph.from_text(graph.text(), allow=["optax"]).resources["learner"].optimizer
    assert math.isnan(found.settings["learning_rate"])


def test_printing_leaves_defaults_out_and_the_text_has_them():
    assert "train=TrainOneStep(epochs=2, minibatch_size=64),\n" in repr(recipe())
    assert (
        'train=TrainOneStep(epochs=2, minibatch_size=64, shuffle=True, learner="learner"),\n'
        in recipe().text()
    )


def test_a_lambda_prints_but_can_not_be_saved():
    graph = abc().then(d=fl.Map(lambda x: x))
    assert "d=Map(fn=<" in repr(graph)
    with pytest.raises(
        fl.errors.SaveError,
        match="<lambda> in test_graph can't be written to a file.*Move it into a module",
    ):
        graph.text()


def test_an_object_without_a_name_can_not_be_saved():
    graph = fl.Graph("g", runners=runners(env_settings={"a": np.zeros(2)}))
    assert "<ndarray>" in repr(graph)
    with pytest.raises(fl.errors.SaveError, match="a ndarray can't be written to a file"):
        graph.text()


def test_loading_refuses_code_of_others_unless_it_is_allowed():
    text = fl.Graph("g").then(a=Pass(), b=fl.Map(double)).text()
    with pytest.raises(
        fl.errors.SaveError,
        match=r"needs code from 'small', which is not flowrl's own; allow it with --import small",
    ) as caught:
        fl.Graph.from_text(text)
    for way in ("fl.load(..., allow=['small'])", "fl.Frozen(..., allow=('small',))"):
        assert way in str(caught.value)
    with pytest.raises(fl.errors.SaveError, match="needs code from 'test_graph'"):
        fl.Graph.from_text(text, allow=["small"])
    assert fl.Graph.from_text(text, allow=["small", "test_graph"]).nodes[0].op == Pass()


def test_loading_imports_nothing_that_is_not_allowed(tmp_path, monkeypatch):
    (tmp_path / "intruder.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    for text in (
        'load("intruder:x")',
        'Graph("g").then(a=Map(load("intruder:x")))',
        'load("flowrl.graph.values:importlib.import_module")("intruder")',
        'load("flowrl.graph.values:named")("intruder:x")',
        'load("flowrl.graph.graph:values.named")("intruder:x")',
    ):
        with pytest.raises((fl.errors.GraphError, fl.errors.SaveError)):
            fl.Graph.from_text(text)
        assert "intruder" not in sys.modules


CALLS = [
    'run(Graph("g"))',
    'Graph("g", x=load("runs/mine", allow=["os"]))',
    'Graph("g", x=load(path="runs/mine"))',
    'load("flowrl.graph.names:sys.exit")("gone")',
    'Graph("g").then(a=Map(load("flowrl.errors:unknown")("a", "b", [])))',
]


@pytest.mark.parametrize("text", CALLS)
def test_loading_calls_nothing_but_what_a_graph_is_made_of(text, monkeypatch):
    """A graph's file must not be able to start a run, read a saved policy, or reach through flowrl
    into Python's own modules."""
    called = []
    for name in ("run", "load"):
        monkeypatch.setattr(fl, name, lambda *a, **k: called.append(a))
    monkeypatch.setattr(sys, "exit", called.append)
    with pytest.raises((fl.errors.GraphError, fl.errors.SaveError), match="line 1"):
        fl.Graph.from_text(text)
    assert called == []


NOT_PLAIN = [
    ("__import__('os')", "line 1: unknown name '__import__'"),
    ("__import__('os').system('x')", "line 1: .*is more than plain data"),
    ("eval('1')", "line 1: unknown name 'eval'"),
    ("Graph('g').nodes", "line 1: .*is more than plain data"),
    ("Graph('g').rename('h')", "line 1: .*is more than plain data"),
    ("Graph('g').then(\n    a=Map(fn=x.y),\n)", "line 2: 'x.y' is more than plain data"),
    (
        "Graph('g').then(\n    a=Concat(1),\n    b=Concat([x for x in (1, 2)]),\n)",
        "line 3: .*is more than plain data",
    ),
    ("Graph('g', **{'a': 1})", r"line 1: \*\* is more than plain data"),
    ("Graph(*['g'])", "line 1: .*is more than plain data"),
    ("{**{}}", "line 1: .*is more than plain data"),
    ("Graph('g').then(a=Concat(1 + 1))", "line 1: '1 \\+ 1' is more than plain data"),
    ("lambda: 1", "line 1: .*is more than plain data"),
    ("f'{1}'", "line 1: .*is more than plain data"),
    ("1 if True else 2", "line 1: .*is more than plain data"),
    ("Graph('g').then(\n  a=Concta(1))", "line 2: unknown name 'Concta'; did you mean 'Concat'"),
    ("Graph('g'\n", "line 1 is no graph"),
    ("", "is no graph"),
    ("import os", "line 1 is no graph"),
    ("Graph('g')\nGraph('h')", "line 2 is no graph"),
    ("3", "holds an int, not a Graph"),
    ("Concat(1)", "holds a Concat, not a Graph"),
    ("(1).then()", "line 1: "),
    ("-'a'", "line 1: "),
    ("{[1]: 2}", "line 1: "),
    ("Graph('g').then(a=Concat(1), a=Concat(2))", "line 1: "),
    ("load('flowrl.nothing:here')", "can't load 'flowrl.nothing:here'"),
    ("load('flowrl.errors:Nothing')", "can't load 'flowrl.errors:Nothing'"),
]


@pytest.mark.parametrize(("text", "message"), NOT_PLAIN, ids=[t for t, _ in NOT_PLAIN])
def test_loading_refuses_what_is_not_plain_data_and_says_the_line(text, message):
    with pytest.raises(fl.errors.GraphError, match=message):
        fl.Graph.from_text(text, source="mine.txt")


def test_an_error_in_a_file_names_the_file():
    with pytest.raises(fl.errors.GraphError) as caught:
        fl.Graph.from_text("Graph('g').nodes", source="mine.txt")
    assert caught.value.where == "mine.txt"


@pytest.mark.parametrize(
    "text",
    ["Graph('g').then(\n  a=Concat(0))", "Graph('g').then(\n  a=Concat(1)).then(\n  a=Concat(1))"],
)
def test_a_setting_or_name_that_is_refused_in_a_file_says_the_line(text):
    with pytest.raises(fl.errors.FlowrlError, match=r"line \d"):
        fl.Graph.from_text(text, source="mine.txt")


# -- any sequence of verbs

EDITS = st.tuples(
    st.sampled_from(
        [
            "then",
            "branch",
            "join",
            "root",
            "insert",
            "remove",
            "replace",
            "nest",
            "set",
            "nest inside",
        ]
    ),
    st.integers(0, 99),
    st.integers(0, 99),
)


def edited(graph, verb, i, j, fresh):
    names = [n.name for n in graph.nodes]
    if not names or verb == "root":
        return graph.then(after=(), **{fresh: C(i + 1)})
    one, other = names[i % len(names)], names[j % len(names)]
    match verb:
        case "then":
            return graph.then(after=graph.ends()[-1], **{fresh: C(i + 1)})
        case "branch":
            return graph.then(after=one, **{fresh: C(j + 1), f"{fresh}_2": C(1)})
        case "join":
            return graph.then(after=dict.fromkeys((one, other)), **{fresh: Merge()})
        case "insert":
            return graph.insert(after=one, **{fresh: C(j + 1)})
        case "remove":
            return graph.remove(one)
        case "replace":
            return graph.replace(**{one: C(j + 1)})
        case "nest":
            return graph.insert(after=one, **{fresh: fl.chain(x=C(1), y=fl.chain(z=C(j + 1)))})
        case "nest inside":
            return graph.then(after=one, **{f"{one}.{fresh}": C(1)})
    found = [n.name for n in graph.nodes if isinstance(n.op, C)]
    return graph.set(f"{found[j % len(found)]}.batch_size", i + 1) if found else graph


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(EDITS, max_size=9))
def test_any_sequence_of_verbs_keeps_a_graph_acyclic_and_readable(edits):
    graph = fl.Graph("g", runners=fl.Runners("CartPole-v1", POLICY))
    for number, (verb, i, j) in enumerate(edits):
        before = graph.text()
        try:
            new = edited(graph, verb, i, j, f"n{number}")
        except fl.errors.GraphError:
            assert verb == "nest inside", (
                "a node may be refused to be a chain as well; all else is allowed"
            )
            continue
        assert graph.text() == before
        graph = new
        order = [n.name for n in graph.nodes]
        assert nx.is_directed_acyclic_graph(graph.digraph()) and len(set(order)) == len(order)
        assert all(order.index(a) < order.index(n.name) for n in graph.nodes for a in n.after)
        assert reread(graph) == graph
        assert sorted(x for stage in graph.stages() for x in stage) == sorted(order)
        assert all(name in graph.draw() for name in order)


def test_numbers_of_numpy_are_written_as_plain_ones():
    graph = fl.ppo("CartPole-v1").set(
        "learner.optimizer", fl.Adam(lr=np.float64(1e-3), max_grad_norm=np.float32(0.5))
    )
    policy = fl.Policy(fl.networks.MLP, log_std=np.float64(-0.5))
    for made in (graph, graph.set("learner.policy", policy).set("runners.policy", policy)):
        assert fl.Graph.from_text(made.text()).text() == made.text()


class Level(enum.IntEnum):
    LOW = 1


class Factory:
    def make(self):
        return None


@pytest.mark.parametrize("value", [Level.LOW, Factory().make])
def test_what_no_name_leads_back_to_is_not_written(value):
    with pytest.raises(fl.errors.SaveError, match="can't be written to a file"):
        fl.ppo("CartPole-v1").set("runners.env_settings", {"level": value}).text()


def test_a_text_makes_only_what_holds_settings():
    runners = 'Runners("CartPole-v1", Policy(networks.MLP))'
    text = f'load("flowrl.rollout.runners:GymRunners")({runners}, None)'
    with pytest.raises(fl.errors.GraphError, match="is more than plain data"):
        fl.Graph.from_text(text)


# -- names of a user's own fields


@dataclass(frozen=True)
class Split(fl.extend.Stateless):
    parts: int = 2

    def step(self, state, item, ctx):
        yield item


@dataclass(frozen=True)
class InParts(fl.Adam):
    parts: tuple[int, ...] = ()


def test_a_users_field_may_be_called_parts():
    graph = recipe(learner=learner(optimizer=InParts(parts=(1, 2)))).insert(
        after="sample", split=Split(parts=3)
    )
    assert "Split(parts=3)" in graph.text().replace('load("test_graph:Split")', "Split")
    assert reread(graph) == graph
    graph.check()


@dataclass(frozen=True)
class Named(fl.extend.Stateless):
    source: str = "file.csv"

    def step(self, state, item, ctx):
        yield item


@dataclass(frozen=True)
class Roomy(fl.extend.Stateless):
    has_capacity: int = 3

    def step(self, state, item, ctx):
        yield item


@pytest.mark.parametrize(
    ("op", "field"), [(Named(), "source='file.csv'"), (Roomy(), "has_capacity=3")]
)
def test_a_field_that_hides_what_every_operator_has_is_reported(op, field):
    wanted = (
        rf"g\.mine: its field {field} hides Operator\.{field.partition('=')[0]}, .*; give the "
        rf"field another name"
    )
    with pytest.raises(fl.errors.CheckError, match=wanted):
        recipe().rename("g").insert(after="sample", mine=op).check()


@dataclass(frozen=True)
class Weighed(fl.losses.PGLoss):
    values: float = 0.5


def test_a_field_that_hides_what_every_loss_has_is_reported():
    with pytest.raises(
        fl.errors.SettingError, match=r"loss: its field values=0.5 hides Loss.values"
    ):
        learner(loss=Weighed())
