"""Faulty graphs: each is rejected before a start, by a message with the node and the way out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import pytest
from small import (
    POLICY,
    AnyAgeLoss,
    Delay,
    Merge,
    Pass,
    Queue,
    SyncEvery,
    halves,
    learner,
    line,
    recipe,
    runners,
    same,
)

import flowrl as fl
from flowrl.graph import trace
from teams import two_learners


@dataclass(frozen=True)
class NeedsMore(fl.losses.PPOLoss):
    """A loss that needs a field which no operator adds."""

    needs: ClassVar[tuple[str, ...]] = (*fl.losses.PPOLoss.needs, "weight")


@dataclass(frozen=True)
class ReturnsNone(fl.extend.Stateless):
    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        return None


@dataclass(frozen=True)
class ReturnsAList(fl.extend.Stateless):
    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        return [item]


@dataclass(frozen=True)
class Raises(fl.extend.Stateless):
    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item.data["no such field"]


@dataclass(frozen=True)
class Outdated(fl.extend.Stateless):
    """Asks for a resource by a name that it did not declare."""

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        ctx["reply"].add(item)
        yield item


class TextObservations(gym.Env):
    observation_space = gym.spaces.Text(3)
    action_space = gym.spaces.Discrete(2)


class Nothing(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (0,))
    action_space = gym.spaces.Discrete(2)


class Sized(gym.Env):
    def __init__(self, size, speed):
        self.size = size * speed


def calls_another(speed=3):
    return Sized(speed)


class TextActions(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Text(3)


def fails():
    raise OSError("no licence")


def with_policy(env, policy):
    return fl.Graph("g", runners=runners(env, policy=policy), learner=learner(policy=policy)).then(
        **{n.name: n.op for n in recipe().nodes}
    )


def two_lengths():
    """A batch of 16 steps in time meets one of 8."""
    graph = fl.Graph("g", runners=runners(), others=runners(rollout_length=8), learner=learner())
    graph = graph.then(one=fl.ParallelSample()).then(
        after=(), two=fl.ParallelSample(runners="others")
    )
    tail = {
        "batch": fl.Concat(128),
        "adv": fl.Advantages(),
        "train": fl.TrainOneStep(),
        "sync": fl.SyncWeights(),
    }
    return graph.then(
        after=("one", "two"),
        both=Merge(),
        **tail,
        sync_others=fl.SyncWeights(runners="others"),
        report=fl.Report(),
    )


S, C, A, T, Y, R = (
    fl.ParallelSample,
    fl.Concat,
    fl.Advantages,
    fl.TrainOneStep,
    fl.SyncWeights,
    fl.Report,
)
STALE = (
    r"is on-policy, but it trains on data up to 1 update old; put SyncWeights\(\) after every "
    r"update"
)


def mixed_up():
    """The second learner is trained on what the first one's policy did."""
    graph = fl.Graph(
        "g",
        runners=runners(),
        others=runners(),
        learner=learner(),
        second=learner(runners="others"),
    ).then(sample=fl.ParallelSample())
    for name, to in (("learner", "runners"), ("second", "others")):
        nodes = {
            "adv": fl.Advantages(learner=name),
            "train": fl.TrainOneStep(learner=name),
            "sync": fl.SyncWeights(learner=name, runners=to),
        }
        graph = graph.then(after="sample", **{f"{key}_{name}": op for key, op in nodes.items()})
    return graph.then(after=("sync_learner", "sync_second"), both=Merge(), report=fl.Report(2))


END = {"train": T(), "sync": Y(), "report": R()}

FAULTY = [
    # (what is wrong, the graph, the nodes that are named - with ? where they need not be -, the
    # message)
    # -- whose data
    (
        "another learner's data",
        mixed_up,
        "train_second",
        r"it trains second, the policy of others, on data of runners; train it on data of others",
    ),
    (
        "another agent's data",
        lambda: two_learners().rename("g").replace(select_blue=fl.Select("red")),
        "train_blue",
        r"it trains blue, the policy of runners.blue, on data of runners.red",
    ),
    # -- names of nodes
    (
        "a weight for no node",
        lambda: line(sample=S(), batch=C(128), mix=fl.Merge({"bach": 1}), adv=A(), **END),
        "mix",
        r"has a weight for bach, which is not before it; before it are: batch",
    ),
    (
        "a phase of no node",
        lambda: line(
            sample=S(), batch=C(128), mix=fl.Switch({"batch": 2, "x": None}), adv=A(), **END
        ),
        "mix",
        r"has a phase for x, which is not before it; before it are: batch",
    ),
    # -- shapes
    (
        "advantages with a trailing dimension",
        lambda: line(
            sample=S(),
            batch=C(128),
            adv=A(),
            more=fl.Map(lambda b: b.with_(advantage=b["advantage"][..., None])),
            train=T(),
            sync=Y(),
            report=R(),
        ),
        "train",
        r"advantage is \[\d+, \d+, 1\], but it has one number a row, which is \[\d+, \d+\]",
    ),
    # -- order
    (
        "advantages after training",
        lambda: line(sample=S(), batch=C(128), train=T(), adv=A(), sync=Y(), report=R()),
        "train",
        r"put Advantages\(\.\.\.\) before",
    ),
    (
        "no advantages",
        lambda: recipe().remove("adv", "norm"),
        "train",
        (
            r"needs the fields advantage, target, but the batch has obs.*; put "
            r"Advantages\(\.\.\.\) before it, or take .* \(APPOLoss, VTraceLoss\)"
        ),
    ),
    (
        "standardised before it is there",
        lambda: recipe().remove("norm").insert(after="batch", norm=fl.Standardize()),
        "norm",
        "needs the field advantage",
    ),
    (
        "sync before training",
        lambda: line(sample=S(), batch=C(128), adv=A(), sync=Y(), train=T(), report=R()),
        "train",
        STALE,
    ),
    (
        "sync before training, weights read too soon",
        lambda: recipe().remove("sync").insert(after="sample", sync=Y()),
        "train",
        STALE,
    ),
    (
        "concat after training",
        lambda: recipe().remove("batch").insert(after="train", batch=C(128)),
        "batch",
        "needs a Batch, got a Trained; put it where",
    ),
    (
        "trained twice in a row",
        lambda: recipe().insert(after="train", again=T()),
        "again",
        "needs a Batch, got a Trained; put it where",
    ),
    (
        "report in the middle",
        lambda: line(sample=S(), adv=A(), train=T(), report=R(), sync=Y()),
        "report",
        "sync comes after it; move Report to the end",
    ),
    # -- resources
    (
        "no learner",
        lambda: recipe().remove("learner"),
        "adv train sync",
        r"unknown resource 'learner'.*add learner=\.\.\. to Graph\(\.\.\.\)",
    ),
    (
        "no runners",
        lambda: recipe().remove("runners"),
        "learner sample sync report",
        r"unknown resource 'runners'.*add runners=\.\.\. to Graph",
    ),
    (
        "a name misspelt",
        lambda: recipe().set("train.learner", "lerner"),
        "train",
        "unknown resource 'lerner'; did you mean 'learner'",
    ),
    (
        "a node for a resource",
        lambda: recipe().set("train.learner", "adv"),
        "train",
        "'adv', but that is a node, not a resource.*set train.learner to",
    ),
    (
        "runners for a learner",
        lambda: recipe().set("train.learner", "runners"),
        "train",
        "its learner must be .*LearnerHandle, but 'runners' is Runners; set",
    ),
    (
        "a learner for runners",
        lambda: recipe().set("sample.runners", "learner"),
        "sample",
        "its runners must be .*RunnersHandle, but 'learner' is Learner",
    ),
    (
        "a learner for the learner's runners",
        lambda: recipe().set("learner.runners", "learner"),
        "learner",
        "its runners must be .*RunnersHandle",
    ),
    (
        "a resource that nobody uses",
        lambda: recipe(spare=runners()),
        "spare",
        r"no node uses it; remove it with \.remove\('spare'\), or name it",
    ),
    (
        "a resource that was not declared",
        lambda: recipe().insert(after="adv", add=Outdated()),
        "add",
        r"'reply'.*Ref\[",
    ),
    # -- what flows
    (
        "a field that nobody adds",
        lambda: recipe(learner=learner(NeedsMore())),
        "train",
        "NeedsMore needs the field weight, but the batch has .*; take a loss",
    ),
    (
        "rollouts of two lengths",
        two_lengths,
        "batch",
        "can't join 16 steps in time with 8; give all runners the same rollout_length",
    ),
    (
        "a minibatch that does not divide",
        lambda: recipe().set("train.minibatch_size", 100),
        "train",
        "minibatch_size=100 does not divide .* 128 steps; take 64 or 128",
    ),
    (
        "a minibatch that is too large",
        lambda: recipe().set("train.minibatch_size", 256),
        "train",
        "minibatch_size=256 does not divide the batch of 128 steps; take",
    ),
    (
        "nothing where a batch must be",
        lambda: recipe().insert(after="batch", look=fl.Map(lambda b: None)),
        "adv",
        "needs a Batch, got a NoneType; put it where",
    ),
    (
        "columns lost on the way",
        lambda: recipe().insert(after="batch", cut=fl.Map(lambda b: fl.extend.Batch(b.data))),
        "adv",
        "needs the column bootstrap_obs",
    ),
    (
        "a loss that is none",
        lambda: recipe().set("learner.loss", 3),
        "learner",
        r"loss must be one such as fl\.losses\.PPOLoss\(\) or a function",
    ),
    # -- age of data and weights
    (
        "a queue before an on-policy loss",
        lambda: recipe().insert(after="norm", queue=Queue()),
        "queue train?",
        "PPOLoss is on-policy.* remove the queue, or take a loss",
    ),
    (
        "a queue",
        lambda: recipe(learner=learner(AnyAgeLoss())).insert(after="norm", queue=Queue()),
        "train",
        (
            "calls learner.update, but learner belongs to the stage of adv, .*; move train to "
            "where adv is, or adv to the same side of the queue"
        ),
    ),
    (
        "a batch late by a round",
        lambda: recipe().insert(after="batch", late=Delay(1)),
        "train",
        STALE,
    ),
    (
        "a round trained in two halves",
        lambda: recipe().insert(after="batch", halves=fl.FlatMap(halves)),
        "train",
        STALE,
    ),
    (
        "weights with every second update",
        lambda: recipe().replace(sync=SyncEvery(2)),
        "train",
        STALE,
    ),
    (
        "weights that reach no runner",
        lambda: recipe().remove("sync"),
        "runners",
        r"act with their first weights for ever.*add sync=SyncWeights\(\)",
    ),
    (
        "weights for others",
        lambda: recipe(others=runners()).set("sync.runners", "others"),
        "runners",
        r"act with their first weights for ever.*add sync=",
    ),
    (
        "a learner that nobody trains",
        lambda: line(sample=S(), sync=Y(), report=R()),
        "learner",
        r"no node trains it; add train=TrainOneStep\(\)",
    ),
    (
        "two policies",
        lambda: recipe(learner=learner(policy=fl.Policy(fl.networks.MLP, hidden=(4,)))),
        "learner",
        "give both the same policy",
    ),
    # -- ends
    (
        "no report",
        lambda: recipe().remove("report"),
        "sync",
        r"no Report closes a Row.*add \.then\(report=Report\(\)\)",
    ),
    (
        "two reports",
        lambda: recipe().then(after="train", again=R()),
        "again",
        "exactly one Report, and there is report too; remove one",
    ),
    (
        "an end without effect",
        lambda: recipe().then(after="batch", look=Pass()),
        "look",
        "an end must be a Report or an effect.*go on from it or remove it",
    ),
    (
        "a concat that never fills",
        lambda: recipe().set("batch.batch_size", 10**9),
        "batch",
        r"took [\d,]+ items and yielded none.*let it fire sooner",
    ),
    (
        "updates that no row reports",
        lambda: recipe().remove("report").then(after="batch", report=R()),
        "train",
        (
            "its updates do not each reach report once, so rows would not report them; put report "
            "after it"
        ),
    ),
    (
        "a filter that drops all",
        lambda: recipe().insert(after="batch", keep=fl.Filter(lambda b: b.steps > 500)),
        "keep",
        "yielded none, so no Row closes",
    ),
    # -- edges
    (
        "two inputs and no join",
        lambda: recipe().then(after=("adv", "train"), x=Y()),
        "x",
        r"takes items from adv, train, but SyncWeights is no join .*let it follow one node only",
    ),
    (
        "no source at the start",
        lambda: recipe().remove("sample"),
        "batch",
        r"Concat stands at a start.*begin with a source such as ParallelSample\(\)",
    ),
    (
        "no source at a second start",
        lambda: recipe().then(after=(), x=C(1), y=Y()),
        "x",
        "Concat stands at a start",
    ),
    (
        "no operators",
        lambda: fl.Graph("g"),
        "",
        r"it has no operators; add them with \.then\(sample=ParallelSample\(\)",
    ),
    # -- names
    (
        "a name used twice",
        lambda: recipe().then(train=T()),
        "",
        "the name 'train' is taken by a node",
    ),
    (
        "a name of a resource",
        lambda: recipe().then(learner=T()),
        "",
        "the name 'learner' is taken by a resource",
    ),
    (
        "a setting that there is not",
        lambda: recipe().set("train.epoch", 3),
        "train",
        "unknown setting 'epoch'; did you mean 'epochs'",
    ),
    (
        "an operator that was not called",
        lambda: recipe().then(x=fl.Concat),
        "",
        "the class itself: call it",
    ),
    # -- environments and policies
    (
        "an unknown environment",
        lambda: recipe(runners=runners("CartPol-v1")),
        "runners",
        "did you mean 'CartPole-v1'",
    ),
    (
        "an unknown version",
        lambda: recipe(runners=runners("CartPole-v7")),
        "runners",
        "did you mean 'CartPole-v1'",
    ),
    (
        "an unknown namespace",
        lambda: recipe(runners=runners("Nowhere/Pong-v5")),
        "runners",
        (
            "unknown environment 'Nowhere/Pong-v5': the package that registers Nowhere must be "
            "imported first"
        ),
    ),
    (
        "an environment that can't be made",
        lambda: recipe(runners=runners(fails)),
        "runners",
        "fails could not be made: OSError: no licence",
    ),
    (
        "an environment that lacks an argument",
        lambda: recipe(runners=runners(Sized)),
        "runners",
        (
            r"Sized could not be made: TypeError: .* required positional arguments: 'size' and "
            r"'speed'.*; set env_settings={'size': \.\.\., 'speed': \.\.\.} of its runners"
        ),
    ),
    (
        "an environment whose function lacks an argument within",
        lambda: recipe(runners=runners(calls_another)),
        "runners",
        r"calls_another could not be made: TypeError: [^;]*'speed'[^;]*$",
    ),
    (
        "a list of runners",
        lambda: recipe().replace(sync=fl.SyncWeights(runners=["runners", "others"])),
        "sync runners?",
        r"its runners must be the name of a resource",
    ),
    (
        "observations without numbers",
        lambda: recipe(runners=runners(Nothing)),
        "learner",
        r"hold no number; where there is nothing to observe, give them one that is always the same",
    ),
    (
        "an environment that is none",
        lambda: recipe(runners=runners(dict)),
        "runners",
        r"dict made a dict; it must be a gymnasium\.Env",
    ),
    (
        "observations in a text",
        lambda: with_policy(TextObservations, POLICY),
        "learner",
        r"a Dict or Tuple of these, not Text\(",
    ),
    (
        "actions in a text",
        lambda: with_policy(TextActions, POLICY),
        "learner",
        "no policy for actions in Text.*it can be Discrete",
    ),
    (
        "a network for images",
        lambda: with_policy("CartPole-v1", fl.Policy(fl.networks.CNN)),
        "learner",
        "convolutions read images with 3 axes.*take MLP",
    ),
    (
        "a setting that the network can't take",
        lambda: with_policy("CartPole-v1", fl.Policy(fl.networks.MLP, hidden=4)),
        "learner",
        r"hidden must be the widths of layers, .*; got 4",
    ),
    (
        "a policy that is none",
        lambda: recipe().set("runners.policy", fl.networks.MLP),
        "runners",
        r"policy must be fl\.Policy\(ModuleClass, \*\*settings\)",
    ),
    # -- numbers
    (
        "no epochs",
        lambda: recipe().set("train.epochs", 0),
        "train",
        "epochs must be at least 1, got 0",
    ),
    (
        "a negative minibatch",
        lambda: recipe().set("train.minibatch_size", -64),
        "train",
        "minibatch_size must be at least 1 or None, got -64",
    ),
    (
        "no steps",
        lambda: recipe().set("batch.batch_size", 0),
        "batch",
        "batch_size must be at least 1, got 0",
    ),
    (
        "no environments",
        lambda: recipe().set("runners.envs_per_runner", 0),
        "runners",
        "envs_per_runner must be at least 1, got 0",
    ),
    (
        "a rollout of nothing",
        lambda: recipe().set("runners.rollout_length", -1),
        "runners",
        "rollout_length must be at least 1, got -1",
    ),
    (
        "a discount above 1",
        lambda: recipe().set("adv.gamma", 1.5),
        "adv",
        "gamma must be from 0 to 1, got 1.5",
    ),
    (
        "a negative rate",
        lambda: recipe().set("learner.optimizer.lr", -1),
        "learner.optimizer",
        r"lr must be from 0 to 1e\+30, got -1.0",
    ),
    (
        "a clip of nothing",
        lambda: recipe().set("learner.loss.clip_ratio", 0),
        "learner.loss",
        "clip_ratio must be above 0, got 0.0",
    ),
    (
        "a report never",
        lambda: recipe().set("report.every", 0),
        "report",
        "every must be at least 1",
    ),
    # -- operators of one's own
    (
        "a step that yields nothing",
        lambda: recipe().insert(after="batch", own=ReturnsNone()),
        "own",
        "its step returned None; .* `yield item`",
    ),
    (
        "a step that returns a list",
        lambda: recipe().insert(after="batch", own=ReturnsAList()),
        "own",
        "its step returned a list; .* `yield item`",
    ),
    (
        "a step that raises",
        lambda: recipe().insert(after="batch", own=Raises()),
        "own",
        "KeyError: 'no such field'",
    ),
]


@pytest.fixture
def started(monkeypatch):
    """What a rejected graph must not do: make a worker or step an environment. It may reset the
    one that it reads the spaces of, to see whether that gives a mask of actions."""
    seen = []
    monkeypatch.setattr(
        "flowrl.rollout.gym_runners.Runner", lambda *a: seen.append("a worker was made")
    )
    for place in ("cartpole.CartPoleEnv", "cartpole.CartPoleVectorEnv"):
        monkeypatch.setattr(
            f"gymnasium.envs.classic_control.{place}.step",
            lambda *a, **k: seen.append("an environment: step"),
        )
    monkeypatch.setattr(trace, "PATIENCE", 1_000)
    return seen


def named(error):
    """The nodes and resources that an error names."""
    lines = error.problems if isinstance(error, fl.errors.CheckError) else [str(error)]
    found = [re.match(r"g(?:\.([\w.]+))?: ", text) for text in lines]
    return [match.group(1) or "" for match in found if match]


@pytest.mark.parametrize(
    ("build", "nodes", "message"), [f[1:] for f in FAULTY], ids=[f[0] for f in FAULTY]
)
def test_a_faulty_graph_is_rejected_before_anything_starts(build, nodes, message, started):
    with pytest.raises((fl.errors.GraphError, fl.errors.SettingError)) as caught:
        build().check()
    assert set(named(caught.value)) - {n[:-1] for n in nodes.split(" ") if n.endswith("?")} == {
        n for n in nodes.split(" ") if not n.endswith("?")
    }
    assert re.search(message, str(caught.value)), str(caught.value)
    assert started == []


def test_the_corpus_is_large_and_has_no_double():
    assert len(FAULTY) >= 30 and len({f[0] for f in FAULTY}) == len(FAULTY)


def test_the_recipe_that_the_faults_are_made_in_is_sound(started):
    recipe().check()
    assert started == []


def test_the_alarm_that_reports_of_a_start_works(started):
    runners().open()
    gym.make("CartPole-v1").unwrapped.step(0)
    assert started == ["a worker was made", "a worker was made", "an environment: step"]


def test_an_unknown_drawing_is_reported():
    with pytest.raises(
        fl.errors.SettingError,
        match="unknown format 'txet'; did you mean 'text'.* Known: text, mermaid, dot, svg",
    ):
        recipe().draw("txet")


def test_several_faults_are_reported_at_once(started):
    graph = (
        recipe(spare=runners())
        .set("train.learner", "lerner")
        .set("adv.learner", "sample")
        .remove("report")
    )
    with pytest.raises(fl.errors.CheckError) as caught:
        graph.compile()
    error = caught.value
    assert named(error) == ["adv", "train", "spare", "sync"]
    assert len(error.problems) == 4
    assert str(error).splitlines() == [
        "g can't run: 4 problems",
        *(f"  {p}" for p in error.problems),
    ]
    assert started == []


def test_faults_of_structure_and_of_what_flows_are_reported_together(started):
    graph = recipe().set("train.minibatch_size", 100).then(after="batch", look=Pass())
    with pytest.raises(fl.errors.CheckError, match="g can't run: 2 problems") as caught:
        graph.check()
    assert set(named(caught.value)) == {"train", "look"}


def test_one_fault_is_reported_once():
    with pytest.raises(
        fl.errors.CheckError, match=r"g can't run: 1 problem\n  g\.train: "
    ) as caught:
        recipe().set("train.minibatch_size", 100).check()
    assert len(caught.value.problems) == 1


def test_a_run_of_a_faulty_graph_starts_nothing(started, tmp_path):
    with pytest.raises(fl.errors.CheckError):
        fl.run(recipe().remove("adv"), out=tmp_path / "out")
    assert started == [] and not (tmp_path / "out").exists()


def test_a_check_error_pickles_with_its_problems():
    import pickle

    with pytest.raises(fl.errors.CheckError) as caught:
        recipe().remove("learner").check()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


@dataclass(frozen=True, slots=True)
class Slots:
    count: int = 0


@dataclass(frozen=True)
class Begins(fl.extend.Operator):
    """Begins with a given state."""

    state: Any

    def init(self):
        return self.state

    def step(self, state: Any, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class MayRefer(fl.extend.Stateless):
    learner: fl.extend.Ref[fl.extend.LearnerHandle] | None = None

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class Unread(fl.extend.Stateless):
    """Its annotation is of a name that is only there for type checkers."""

    kind: "Imported" = None  # noqa: F821

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


@dataclass(frozen=True)
class NotReady(fl.extend.Stateless):
    source: ClassVar[bool] = True

    def ready(self, state, ctx):
        raise OSError("no such device")

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item


RUNNERS = runners()


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda g: g.replace(sync=fl.SyncWeights(runners=RUNNERS)),
            (
                r"g\.sync: its runners must be the name of a resource, got a Runners; write "
                r"Graph\(\.\.\., runners=Runners\(\.\.\.\)\) and runners='runners'"
            ),
        ),
        (
            lambda g: g.replace(train=fl.TrainOneStep(learner=None)),
            (
                r"g\.train: its learner must be the name of a resource, got a NoneType; give it "
                r"the name of a resource of the graph"
            ),
        ),
        (
            lambda g: g.insert(after="train", own=MayRefer("lerner")),
            r"g\.own: unknown resource 'lerner'; did you mean 'learner'",
        ),
        (
            lambda g: g.insert(after="train", own=Begins(Slots())),
            r"g\.own: its init returned a Slots, .* which a step can't change in place",
        ),
        (
            lambda g: g.insert(after="train", own=Unread()),
            (
                r"the annotations of Unread can't be read: name 'Imported' is not defined; import "
                r"that name at run time, not under `if TYPE_CHECKING`"
            ),
        ),
    ],
)
def test_what_a_class_of_ones_own_gets_wrong_is_reported_with_the_way_out(edit, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        edit(recipe()).check()


def test_a_reference_that_is_none_refers_to_nothing():
    recipe().insert(after="train", own=MayRefer()).check()


@pytest.mark.parametrize("name", ["my runners", "class"])
def test_a_resource_has_a_name_that_python_takes(name):
    with pytest.raises(fl.errors.GraphError, match=f"'{name}' can't be a name"):
        fl.Graph("g", **{name: RUNNERS})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"full": "drop-newest"}, "full must be one of block, drop_oldest, drop_newest, got"),
        ({"order": "LIFO"}, "order must be one of fifo, lifo, got 'LIFO'"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"max_lag": -1}, "max_lag must not be negative, got -1"),
    ],
)
def test_bounds_that_no_queue_has_are_refused(settings, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.extend.Bounds(**{"capacity": 4, **settings})


def test_what_a_node_raises_when_it_is_asked_whether_it_is_ready_has_its_address():
    graph = recipe().then(after=(), own=NotReady(), back=fl.Map(same))
    with pytest.raises(OSError, match="no such device") as caught:
        trace.trace(graph)
    assert caught.value.__notes__ == ["in g.own"]


def test_a_text_that_names_a_module_of_flowrl_runs_nothing():
    with pytest.raises(fl.errors.GraphError, match="can't load 'flowrl.__main__:x'"):
        fl.Graph.from_text('fl.Graph("g").then(a=Map(load("flowrl.__main__:x")))')


def test_a_chain_is_read_with_and_without_the_name_of_the_package():
    text = str(fl.Graph("g").then(a=fl.chain(b=fl.Concat(8), c=fl.Concat(16))).text())
    assert "chain(" in text
    assert fl.Graph.from_text(text.replace("chain(", "fl.chain(")) == fl.Graph.from_text(text)


def test_a_queue_that_does_not_cut_the_graph_has_a_plan():
    graph = line(loss=AnyAgeLoss(), sample=fl.ParallelSample(), adv=fl.Advantages(), queue=Queue())
    graph = graph.then(after=("adv", "queue"), mix=Merge(), train=fl.TrainOneStep())
    plan = graph.then(sync=fl.SyncWeights(), report=fl.Report()).compile()
    assert plan.lag_bound > 0 and "queue" in str(plan)
