"""Every graph of the field's vocabulary can be written, printed, drawn, compared and edited.

It can be saved, too, and is cut where it should be.
"""

import pickle
import xml.etree.ElementTree as ET

import networkx as nx
import pytest

import flowrl as fl
import vocabulary_stubs as v
from flowrl.graph.refs import refs

POLICY = fl.Policy(fl.networks.MLP)


def graph(name, loss=None, **resources):
    runners = fl.Runners("CartPole-v1", POLICY, num_runners=2)
    return fl.Graph(
        name,
        **{
            "runners": runners,
            "learner": fl.Learner(POLICY, loss or fl.losses.PPOLoss(), fl.Adam()),
            **resources,
        },
    )


def ppo():
    return graph("ppo").then(
        sample=fl.ParallelSample(),
        batch=fl.Concat(4000),
        adv=fl.Advantages(),
        train=fl.TrainOneStep(epochs=10, minibatch_size=100),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def a2c_with_micro_batches():
    return graph("a2c", fl.losses.PGLoss()).then(
        sample=fl.ParallelSample(),
        batch=fl.Concat(500),
        adv=fl.Advantages(),
        grads=fl.ComputeGradients(),
        mean=fl.AverageGradients(4),
        apply=fl.ApplyGradients(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def a3c():
    local = fl.chain(adv=fl.Advantages(), g=fl.ComputeGradients())
    return graph("a3c", fl.losses.PGLoss()).then(
        grads=fl.ParallelSample(mode="async", local=local),
        apply=fl.ApplyGradients(),
        sync=fl.SyncWeights(to="producer"),
        report=fl.Report(),
    )


def impala():
    return graph("impala", fl.losses.VTraceLoss(ent_coef=0.01)).then(
        sample=fl.ParallelSample(mode="async", in_flight=2),
        batch=fl.Concat(500),
        queue=fl.Queue(16),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(to="producer", every=2, wait=False),
        report=fl.Report(every=10),
    )


def appo():
    edited = (
        impala()
        .rename("appo")
        .insert(after="queue", mix=fl.MixIn(batches=4, uses=2))
        .insert(after="train", target=fl.UpdateTarget(every=2))
    )
    return edited.set("learner.loss", fl.losses.APPOLoss(clip_ratio=0.4))


def dqn():
    return graph("dqn", fl.losses.DQNLoss(), replay=fl.Replay(50_000, prioritized=True)).then(
        sample=fl.ParallelSample(),
        add=fl.ReplayAdd(),
        batch=fl.ReplaySample(batch_size=32, learning_starts=1000, updates_per_step=0.25),
        train=fl.TrainOneStep(),
        prio=fl.UpdatePriorities(),
        target=fl.UpdateTarget(every=500),
        sync=fl.SyncWeights(),
        report=fl.Report(every=100),
    )


def apex():
    start = graph("apex", fl.losses.DQNLoss(), replay=fl.Replay(1_000_000, prioritized=True)).then(
        sample=fl.ParallelSample(
            mode="async", in_flight=2, local=fl.chain(p=fl.InitialPriorities())
        ),
        add=fl.ReplayAdd(),
        sync=fl.SyncWeights(to="producer", every_steps=400),
    )
    return start.then(
        after=(),
        batch=fl.ReplaySample(batch_size=512, learning_starts=50_000),
        queue=fl.Queue(16),
        train=fl.TrainOneStep(),
        prio=fl.UpdatePriorities(),
        target=fl.UpdateTarget(every_steps=500_000),
        report=fl.Report(),
    )


def cloning():
    return graph("cloning", fl.losses.PGLoss()).then(
        read=v.ReadDataset("expert.zarr"),
        batch=fl.Concat(2000),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        eval=fl.Evaluate(every=100),
        report=fl.Report(),
    )


def online_with_demonstrations():
    start = graph("demos", fl.losses.DQNLoss(), replay=fl.Replay(50_000)).then(
        sample=fl.ParallelSample(), add=fl.ReplayAdd(), batch=fl.ReplaySample(batch_size=32)
    )
    return start.then(after=(), demo=v.ReadDataset("expert.zarr")).then(
        after=("batch", "demo"),
        mix=fl.Merge({"batch": 3, "demo": 1}),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def two_algorithms():
    learners = {
        "learner_a": fl.Learner(POLICY, fl.losses.PPOLoss(), fl.Adam()),
        "learner_b": fl.Learner(POLICY, fl.losses.DQNLoss(), fl.Adam()),
    }
    start = fl.Graph(
        "two", runners=fl.Runners("CartPole-v1", POLICY), **learners, replay=fl.Replay(1000)
    ).then(sample=fl.ParallelSample())
    return (
        start.then(
            after="sample",
            a=v.Select("a"),
            batch_a=fl.Concat(200),
            adv_a=fl.Advantages(learner="learner_a"),
            train_a=fl.TrainOneStep(learner="learner_a"),
            sync_a=fl.SyncWeights(learner="learner_a"),
        )
        .then(
            after="sample",
            b=v.Select("b"),
            add_b=fl.ReplayAdd(),
            draw_b=fl.ReplaySample(batch_size=32),
            train_b=fl.TrainOneStep(learner="learner_b"),
            sync_b=fl.SyncWeights(learner="learner_b"),
        )
        .then(after=("sync_a", "sync_b"), all=fl.Merge(), report=fl.Report())
    )


def evolution():
    return graph("evolution", fl.losses.EvolutionLoss()).then(
        tries=fl.ParallelEvaluate(pairs=100, sigma=0.02, episodes=2),
        rank=fl.CentredRanks(),
        update=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def maml():
    inner = v.Loop(3, fl.chain(sample=fl.ParallelSample(), adapt=v.Adapt(0.1)))
    return graph("maml").then(
        task=v.SetTask(),
        inner=inner,
        meta=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def phases():
    phase = v.Phase(
        {"offline": v.Until("updates", 1e4), "online": v.Until("env_steps", float("inf"))}
    )
    return graph("phases", fl.losses.DQNLoss(), replay=fl.Replay(10_000)).then(
        sample=fl.ParallelSample(),
        add=fl.ReplayAdd(),
        batch=fl.ReplaySample(batch_size=16),
        fill=fl.Gate(start=5_000),
        phase=phase,
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


def league():
    return graph("league", opponents=v.Opponents(20)).then(
        match=v.MatchMaker(win_rate=0.55),
        sample=fl.ParallelSample(),
        pick=v.Select("learner"),
        batch=fl.Concat(4000),
        adv=fl.Advantages(),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        snapshot=v.Snapshot(every=50),
        report=fl.Report(),
    )


def two_queues():
    """Actors, an assembler and a learner, each a stage; a zip joins within a stage, a queue may
    have two inputs."""
    start = graph("pipeline", fl.losses.VTraceLoss()).then(
        sample=fl.ParallelSample(mode="async"), assemble=fl.Queue(8), batch=fl.Concat(500)
    )
    start = start.then(after=(), more=fl.ParallelSample(mode="async"))
    return start.then(
        after=("batch", "more"),
        queue=fl.Queue(4),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )


GRAPHS = {
    ppo: (("sample", "batch", "adv", "train", "sync", "report"),),
    a2c_with_micro_batches: (
        ("sample", "batch", "adv", "grads", "mean", "apply", "sync", "report"),
    ),
    a3c: (("grads", "apply", "sync", "report"),),
    impala: (("sample", "batch"), ("queue", "train", "sync", "report")),
    appo: (("sample", "batch"), ("queue", "mix", "train", "target", "sync", "report")),
    dqn: (("sample", "add", "batch", "train", "prio", "target", "sync", "report"),),
    apex: (("sample", "add", "sync"), ("batch",), ("queue", "train", "prio", "target", "report")),
    cloning: (("read", "batch", "train", "sync", "eval", "report"),),
    online_with_demonstrations: (
        ("sample", "add", "batch", "demo", "mix", "train", "sync", "report"),
    ),
    two_algorithms: (
        (
            *("sample", "a", "batch_a", "adv_a", "train_a", "sync_a"),
            *("b", "add_b", "draw_b", "train_b", "sync_b"),
            *("all", "report"),
        ),
    ),
    evolution: (("tries", "rank", "update", "sync", "report"),),
    maml: (("task", "inner", "meta", "sync", "report"),),
    phases: (("sample", "add", "batch", "fill", "phase", "train", "sync", "report"),),
    league: (("match", "sample", "pick", "batch", "adv", "train", "sync", "snapshot", "report"),),
    two_queues: (
        ("sample",),
        ("assemble", "batch"),
        ("more",),
        ("queue", "train", "sync", "report"),
    ),
}

every = pytest.mark.parametrize("build", GRAPHS, ids=lambda f: f.__name__)


@every
def test_it_is_cut_into_these_stages(build):
    assert build().stages() == GRAPHS[build]


@every
def test_it_prints_and_reads_back(build):
    text = build().text()
    again = fl.Graph.from_text(text, allow=["vocabulary_stubs"])
    assert again == build() and again.text() == text
    assert all(
        f"{name}=" in repr(build())
        for name in (*build().resources, *(n.name for n in build().nodes))
    )


@every
def test_it_compares_and_pickles(build):
    assert pickle.loads(pickle.dumps(build())) == build()
    assert hash(build()) == hash(build())
    assert [f for f in GRAPHS if f() == build()] == [build]


@every
def test_it_draws_as_text_with_every_name(build):
    drawing = build().draw("text")
    for node in build().nodes:
        (found,) = [
            x
            for x in drawing.splitlines()
            if f" {node.name} " in f"{x} " and type(node.op).__name__ in x
        ]
        assert "●" in found
        assert all(
            target in found.split(type(node.op).__name__)[1] for target, _ in refs(node.op).values()
        )
    for name, resource in build().resources.items():
        assert any(
            x.startswith(f"  ◆ {name} ") and resource.describe() in x for x in drawing.splitlines()
        )


@every
def test_it_draws_as_mermaid_and_dot_with_every_name_and_edge(build):
    graph, mermaid, dot = build(), build().draw("mermaid"), build().draw("dot")
    for name in (*graph.resources, *(n.name for n in graph.nodes)):
        assert f'"{name}<br/>' in mermaid
        assert f'"{name}" [label="{name}\\n' in dot
    edges = [(a, n.name) for n in graph.nodes for a in n.after]
    uses = sum(len(refs(n.op)) for n in graph.nodes)
    assert all(f'"{a}" -> "{b}";' in dot for a, b in edges) and all(
        f"n_{a} --> n_{b}\n" in mermaid for a, b in edges
    )
    assert mermaid.count(" --> ") == dot.count(" -> ") - uses == len(edges)
    assert mermaid.count(" -.-> ") == dot.count("[style=dashed]") == uses


@every
def test_it_draws_as_svg_with_every_name_and_edge(build):
    graph = build()
    root = ET.fromstring(graph.draw("svg"))
    texts = [e.text for e in root.iter() if e.tag.endswith("}text")]
    paths = [e.get("class") for e in root.iter() if e.tag.endswith("}path")]
    boxes = [e for e in root.iter() if e.tag.endswith("}rect") and e.get("rx")]
    names = [*(n.name for n in graph.nodes), *graph.resources]
    assert all(name in texts for name in names)
    assert paths.count("edge") == sum(len(n.after) for n in graph.nodes)
    assert paths.count("ref") == sum(len(refs(n.op)) for n in graph.nodes)
    places = [tuple(float(box.get(k)) for k in ("x", "y", "width", "height")) for box in boxes]
    assert len(set(places)) == len(places) == len(names), "two boxes in one place"
    wide, high = float(root.get("width")), float(root.get("height"))
    assert all(x >= 0 and y >= 0 and x + w <= wide and y + h <= high for x, y, w, h in places)


@every
def test_it_is_acyclic_although_weights_go_round(build):
    assert nx.is_directed_acyclic_graph(build().digraph())


def test_appo_is_impala_edited():
    before, after = impala(), appo()
    assert (
        after.remove("mix", "target")
        .set("learner.loss", fl.losses.VTraceLoss(ent_coef=0.01))
        .rename("impala")
        == before
    )
    assert [n.after for n in after.nodes] == [
        (),
        ("sample",),
        ("batch",),
        ("queue",),
        ("mix",),
        ("train",),
        ("target",),
        ("sync",),
    ]


def test_impala_without_its_queue_and_async_sample_is_one_stage():
    graph = impala().remove("queue").replace(sample=fl.ParallelSample())
    assert graph.stages() == (("sample", "batch", "train", "sync", "report"),)
    assert graph.nodes[2].after == ("batch",)


def test_a_queue_is_drawn_apart():
    assert '[("queue<br/>Queue")]' in impala().draw("mermaid")
    assert '<rect class="queue"' in impala().draw("svg")
    assert '(["report<br/>Report"])' in impala().draw("mermaid")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: fl.Concat(batch_size="4096"),
            r"Concat\.batch_size: takes a whole number, got '4096'",
        ),
        (lambda: fl.Advantages(gamma="0.99"), r"Advantages\.gamma: takes a number, got '0.99'"),
        (lambda: v.Opponents(2.5), r"Opponents\.size: takes a whole number, got 2\.5"),
        (lambda: fl.Concat(4096.0), r"Concat\.batch_size: takes a whole number, got 4096\.0"),
        (
            lambda: fl.TrainOneStep(epochs=1.5),
            r"TrainOneStep\.epochs: takes a whole number, got 1\.5",
        ),
        (
            lambda: fl.ppo("CartPole-v1", num_runners=1.5),
            r"PPOSettings\.num_runners: takes a whole number, got 1\.5",
        ),
        (
            lambda: fl.ppo("CartPole-v1", normalize="no"),
            r"PPOSettings\.normalize: takes True or False, got 'no'",
        ),
        (lambda: fl.Evaluate(episodes=2.5), r"Evaluate\.episodes: takes a whole number, got 2\.5"),
        (lambda: fl.RandomStart(1e3), r"RandomStart\.steps: takes a whole number, got 1000\.0"),
        (lambda: fl.Replay(buffer_size="4"), r"Replay\.buffer_size: takes a whole number, got '4'"),
        (lambda: fl.Adam("3e-4"), r"Adam\.lr: takes a number or Linear.*, got '3e-4'"),
        (
            lambda: fl.losses.PPOLoss(clip_ratio="x"),
            r"PPOLoss\.clip_ratio: takes a number, got 'x'",
        ),
        (lambda: fl.EpsilonGreedy("1"), r"EpsilonGreedy\.start: takes a number, got '1'"),
        (
            lambda: fl.ppo("CartPole-v1", num_runners="2"),
            r"Runners\.num_runners: takes a whole number",
        ),
        (lambda: fl.Adam(lr=-1), "^Adam: lr must be from 0 to"),
        (lambda: fl.Adam(b1=2.0), "^Adam: b1 must be from 0 to"),
        (lambda: fl.losses.PPOLoss(clip_ratio=-1), "^PPOLoss: clip_ratio must be above 0"),
    ],
)
def test_a_wrong_value_is_named_with_its_class_and_field(make, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        make()
