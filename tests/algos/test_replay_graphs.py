"""The stock graphs with a replay: what they plan they do, in one process and on Ray.

What is wrong with one is reported; and a shard that is killed.
"""

import math
import os
import signal
import threading
from dataclasses import replace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import flowrl as fl
from conftest import RAY, with_system
from environments import Corridor
from flowrl.algos.tuned import tuned
from flowrl.core.events import OperatorRan, Tap
from flowrl.graph import trace
from flowrl.graph.stages import Schedule
from flowrl.replay.ring import Ring
from flowrl.runtime.periodicity import Periodicity, Section, Stretch, periodicity

SMALL = fl.Policy(fl.networks.QNetwork, hidden=(8,))
DQN = {
    "envs_per_runner": 4,
    "rollout_length": 4,
    "learning_starts": 64,
    "batch_size": 16,
    "updates_per_step": 0.25,
    "report_every": 5,
    "target_update_every": 3,
    "policy": SMALL,
}
SAC = {
    "learning_starts": 8,
    "batch_size": 16,
    "report_every": 5,
    "policy": fl.Policy(fl.networks.SACNetwork, hidden=(8,)),
}
TD3 = {"learning_starts": 8, "batch_size": 16, "report_every": 6, "hidden": (8,)}
R2D2 = {
    "envs_per_runner": 4,
    "rollout_length": 4,
    "learning_starts": 64,
    "batch_size": 4,
    "sequence_length": 5,
    "burn_in": 2,
    "updates_per_step": 0.25,
    "report_every": 5,
    "hidden": (8,),
    "size": 8,
}
GRAPHS = {
    "dqn": fl.dqn("CartPole-v1", fl.DQNSettings(**DQN)),
    "every setting": fl.dqn(
        "CartPole-v1",
        fl.DQNSettings(
            **DQN | {"policy": None},
            dueling=True,
            prioritized=True,
            n_step=3,
            buffer_size=128,
            normalize=True,
            normalize_rewards=True,
        ),
    ),
    "minibatches": fl.dqn(
        "CartPole-v1", fl.DQNSettings(**DQN, minibatch_size=4, prioritized=True, double=False)
    ),
    "jax": fl.dqn(
        "gymnax:CartPole-v1", fl.DQNSettings(**DQN, prioritized=True, normalize_rewards=True)
    ),
    "rainbow": fl.rainbow("CartPole-v1", **DQN | {"policy": None}, hidden=(8,), atoms=5),
    "rainbow, jax": fl.rainbow("gymnax:CartPole-v1", **DQN | {"policy": None}, hidden=(8,)),
    "apex": fl.apex("CartPole-v1", fl.ApexSettings(**DQN, sync_every=2)),
    "apex, jax": fl.apex("gymnax:CartPole-v1", fl.ApexSettings(**DQN)),
    "r2d2": fl.r2d2("CartPole-v1", fl.R2D2Settings(**R2D2)),
    "r2d2, jax": fl.r2d2("gymnax:CartPole-v1", fl.R2D2Settings(**R2D2, prioritized=False)),
    "sac": fl.sac("Pendulum-v1", fl.SACSettings(**SAC)),
    "td3": fl.td3("Pendulum-v1", **TD3),
    "ddpg": fl.ddpg("Pendulum-v1", **{**TD3, "n_step": 2, "normalize": True}),
    "sac, n-step": fl.sac(
        "Pendulum-v1", fl.SACSettings(**SAC, n_step=3, envs_per_runner=2, rollout_length=2)
    ),
}


def rows_of(graph, count, **how):
    with fl.run(graph, **how) as run:
        rows = [next(run) for _ in range(count)]
    return rows, run


SLOW = ("rainbow", "rainbow, jax", "r2d2, jax", "td3", "sac, n-step")
"""What compiles for long, and shares with others what it is made of."""


@pytest.mark.system
@pytest.mark.parametrize("name", with_system(GRAPHS, SLOW))
def test_what_is_planned_is_done(name):
    plan = GRAPHS[name].compile()
    rows, run = rows_of(plan, 8)  # up to the end of a rollout's draws
    counts, ratio = run.counts(), plan.total("replayed_steps") / plan.total("added_steps")
    assert rows[-1]["updates"] == 8 * plan.per_row("updates") and all(
        math.isfinite(row["loss"]) for row in rows
    )
    after = (
        counts["added_steps"] - plan.found.idle_steps + counts["sampled_steps"] / counts["requests"]
    )  # the rollout with the first update counts
    assert (
        counts["replayed_steps"] / after == pytest.approx(ratio, rel=0.01)
        and counts["used_steps"] == counts["replayed_steps"]
    )
    audit = run.audit()
    stock = audit.stocks["replay"]
    assert (
        audit.closed
        and stock.added == counts["added_steps"] == counts["sampled_steps"]
        and stock.lost == 0
    )
    assert (stock.evicted > 0) == (name == "every setting")


class Far(gym.ObservationWrapper):
    """Pendulum whose observations are far from 0, and whose rewards are huge."""

    def __init__(self):
        env = gym.wrappers.TransformReward(gym.make("Pendulum-v1"), lambda reward: 1e6 * reward)
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def observation(self, observation):
        return 1_000 + 50 * observation


@pytest.mark.system
def test_normalised_observations_are_kept_with_the_policy_and_rewards_train_at_their_scale(
    tmp_path,
):
    settings = {**SAC, "policy": None, "learning_starts": 200}
    graph = fl.sac(Far, **settings, normalize=True, normalize_rewards=True)
    with fl.run(graph, steps=260, out=tmp_path / "run") as run:
        rows = list(run)
    assert abs(rows[-1]["q_mean"]) < 100, "the rewards themselves are about -6e6"
    policy = fl.load(tmp_path / "run", env=Far)
    norm = {name.rpartition("/")[2]: x for name, x in policy.weights.rest.items()}
    np.testing.assert_allclose(norm["mean"], 1_000, atol=60)
    assert (np.sqrt(norm["var"]) > 10).all()
    near, far = np.float32([[1000, 1000, 1000], [1050, 1000, 1000]])
    assert (policy.act(near) != policy.act(far)).any(), "the difference is not lost in the offset"
    np.testing.assert_array_equal(policy.act(near), run.policy.act(near))


@pytest.mark.parametrize("name", with_system(["every setting", "rainbow", "sac"], {*SLOW, "sac"}))
def test_the_same_seed_gives_the_same_run_and_another_seed_another(name):
    one, again, other = (
        [row["loss"] for row in rows_of(GRAPHS[name], 3, seed=seed)[0]] for seed in (0, 0, 1)
    )
    assert one == again != other


ONE = {"runners.envs_per_runner": 1, "runners.rollout_length": 1, "replay.buffer_size": 2_000_000}
"""One environment, a step at a time."""


def changed(graph, settings):
    for address, value in settings.items():
        graph = graph.set(address, value)
    return graph


def two_starts():
    """A second reader, which waits longer, while the first one trains already."""
    graph = changed(GRAPHS["dqn"], ONE)
    ops = {n.name: n.op for n in graph.nodes}
    tail = {name: ops[name] for name in ("train", "target", "sync", "report")}
    early, late = (replace(ops["batch"], learning_starts=start) for start in (500, 4_001))
    graph = graph.remove("batch", *tail).then(after="add", early=early).then(after="add", late=late)
    return graph.then(after=("early", "late"), mix=fl.Merge(), **tail)


WARMED = {
    "dqn": changed(GRAPHS["dqn"], {**ONE, "batch.learning_starts": 1_001}),
    "rollouts": GRAPHS["dqn"].set("batch.learning_starts", 9_000),
    "sac": GRAPHS["sac"].set("batch.learning_starts", 1_001),
    "apex": changed(GRAPHS["apex"], {**ONE, "batch.learning_starts": 1_001}),
    "long returns": changed(
        GRAPHS["dqn"], {**ONE, "batch.learning_starts": 1_001, "replay.n_step": 100}
    ),
    "jax": changed(GRAPHS["jax"], {**ONE, "batch.learning_starts": 1_001, "replay.n_step": 20}),
    "a gate": changed(GRAPHS["dqn"], {**ONE, "batch.learning_starts": 1_000}).insert(
        after="add", gate=fl.Gate(2_500)
    ),
    "two starts": two_starts(),
}


@pytest.mark.parametrize("name", with_system(WARMED, {"a gate", "two starts", "jax"}))
def test_a_warm_up_that_is_skipped_is_planned_as_one_that_is_gone_through(name, monkeypatch):
    def numbers():
        plan = WARMED[name].compile()
        own = {
            k: v
            for k, v in vars(plan.found).items()
            if k not in ("first_items", "lags", "mean_lags")
        }
        return str(plan), own, periodicity(WARMED[name], plan.found) if name == "jax" else None

    turns, turn = [], Schedule.round
    monkeypatch.setattr(Schedule, "round", lambda self: turns.append(self) or turn(self))
    quick = numbers()
    few = len(turns)
    monkeypatch.setattr(trace, "PATIENCE", 1_000_000)
    monkeypatch.setattr(trace.Tracer, "skip", lambda *_: 0)
    assert quick == numbers() and quick[1]["exact"]
    assert 0 < few < 0.7 * (len(turns) - few)


@pytest.mark.parametrize("name", with_system(["dqn", "sac", "td3", "apex"], {"sac", "td3", "apex"}))
def test_a_start_of_a_million_single_steps_is_planned_in_few_rounds(name, monkeypatch):
    turns, turn = [], Schedule.round
    monkeypatch.setattr(Schedule, "round", lambda self: turns.append(self) or turn(self))
    plan = changed(getattr(fl, name)(), {**ONE, "batch.learning_starts": 1_000_000}).compile()
    assert (
        plan.found.exact and 1_000_000 <= plan.found.idle_steps < 1_000_008 and len(turns) < 5_000
    )


def test_a_plan_does_not_depend_on_how_long_it_may_take(monkeypatch):
    monkeypatch.setattr(trace, "PATIENCE", 0)
    plan = fl.sac(
        "Pendulum-v1", fl.SACSettings(learning_starts=20_000, policy=SAC["policy"])
    ).compile()
    assert "after 20,199 steps of warm-up, 20,000 of them before the first update" in str(plan)


@pytest.mark.system
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"batch.updates_per_step": 100.0, "report.every": 40},
            ("replay ratio 1600: ", "every 40 items ", 0.4, 40),
        ),
        (
            {"batch.updates_per_step": 100.0, "batch.batch_size": 8, "report.every": 40},
            ("replay ratio 800: ", "every 40 items ", 0.4, 40),
        ),
        (
            {"report.every": 7, "target.every": 11, "sync.every": 13},
            ("replay ratio 4: ", "every 7 items ", 28, 7),
        ),
    ],
)
def test_means_are_those_after_the_first_row_and_settings_are_reported_as_they_are_set(
    settings, says, monkeypatch
):
    monkeypatch.setattr(trace, "PATIENCE", 3_000)
    plan = changed(GRAPHS["dqn"].insert(after="batch", own=Total()), settings).compile()
    ratio, every, steps, updates = says
    assert not plan.found.exact and ratio in str(plan) and every in str(plan)
    assert (plan.per_row("sampled_steps"), plan.per_row("updates")) == (
        pytest.approx(steps, rel=0.05),
        pytest.approx(updates, rel=0.05),
    )


def test_each_replay_is_filled_to_its_own_mark_where_rounds_are_skipped():
    nodes = {n.name: n.op for n in GRAPHS["dqn"].nodes}
    own = {name: GRAPHS["dqn"].resources[name] for name in ("runners", "learner")}
    graph = (
        fl.Graph("two", **own, replay=fl.Replay(100_000), demo=fl.Replay(100_000))
        .then(sample=nodes["sample"], add=fl.ReplayAdd(), keep=fl.ReplayAdd(replay="demo"))
        .then(after="keep", late=fl.ReplaySample(16, learning_starts=50_000))
        .then(after="keep", early=fl.ReplaySample(16, replay="demo", learning_starts=1_000))
        .then(after=("late", "early"), mix=fl.Merge(), train=nodes["train"])
        .then(**{name: nodes[name] for name in ("target", "sync", "report")})
    )
    found = graph.compile().found
    assert found.exact and 50_000 <= found.warmup_steps < 60_000
    assert found.steady["late"].given == found.steady["early"].given > 0


def test_means_do_not_hold_what_was_skipped_before_the_last_reader_began(monkeypatch):
    monkeypatch.setattr(trace, "PATIENCE", 3_000)
    plan = two_starts().insert(after="late", own=Total()).compile()
    assert not plan.found.exact
    assert plan.per_row("sampled_steps") == pytest.approx(5 / (2 * 0.25), rel=0.2)


class Total(fl.extend.Operator):
    """Counts for ever, so that no state recurs."""

    def init(self):
        return {"items": 0}

    def step(self, held, item, ctx):
        held["items"] += 1
        yield item


def test_exploration_is_reported_where_it_is_not_the_policys_own():
    for text in (str(GRAPHS["dqn"].compile()), GRAPHS["dqn"].draw("text")):
        assert "of CartPole-v1, EpsilonGreedy" in text
    assert "of Pendulum-v1   1 step a call" in str(GRAPHS["sac"].compile())


@pytest.mark.parametrize("capacity", [10**13, 10**15])
def test_a_replay_that_memory_can_not_hold_is_reported_with_its_bytes(capacity):
    with pytest.raises(
        fl.errors.SettingError,
        match=rf"buffer_size={capacity:,} takes .*GB for observations alone, more than there is "
        rf"memory; lower replay\.buf",
    ):
        rows_of(GRAPHS["dqn"].set("replay.buffer_size", capacity), 1)


class Wide(Corridor):
    observation_space = gym.spaces.Box(0, 1, (1_000,))

    def observe(self, place):
        return jnp.full(1_000, place / 6)


def test_nor_one_that_the_device_can_not_hold():
    graph = fl.dqn(Wide, fl.DQNSettings(buffer_size=2 * 10**9, policy=SMALL))
    with pytest.raises(
        fl.errors.SettingError,
        match=r"dqn.add: buffer_size=2,000,000,000 takes .*GB, more than there is memory on the "
        r"device; lower replay\.buf",
    ):
        rows_of(graph, 1, runtime="xla")
    with pytest.raises(
        fl.errors.CheckError,
        match=r"dqn.add: .*buffer_size=3,000,000,000 is more than the 2,147,483,647 steps of a "
        r"device; lower replay\.buf",
    ):
        graph.set("replay.buffer_size", 3 * 10**9).check()


def test_what_memory_can_not_hold_of_the_fields_is_reported_with_all_bytes(monkeypatch):
    def none(self, batch):
        raise MemoryError

    monkeypatch.setattr(Ring, "_allocate", none)
    with pytest.raises(
        fl.errors.SettingError,
        match=r"buffer_size=50,000 takes 1\.8 MB, more than there is memory; lower "
        r"replay\.buffer_size",
    ):
        rows_of(GRAPHS["dqn"], 1)


def test_the_plan_reports_the_ratio_the_warm_up_and_the_bytes():
    text = str(GRAPHS["every setting"].set("target.every", 5).compile())
    for part in (
        (
            "data of any age, repeats every 4 rows after 80 steps of warm-up, 64 of them before "
            "the first update"
        ),
        "batch    16 steps a batch, 5 batches a row",
        "replay ratio 4: steps sampled for each that is added",
        "each sample used 4 times",
        "replay   128 steps, prioritized, 3-step returns",
    ):
        assert part in text, text


def acting_by(module, graph):
    policy = fl.Policy(module)
    return graph.set("runners.policy", policy).set("learner.policy", policy)


def two_draws(graph, often, seldom):
    """A sample from the same replay, one for one, beside what is sampled."""
    sampler = next(n.op for n in graph.nodes if n.name == "batch")
    tail = {n.name: n.op for n in graph.nodes if n.name in ("train", "target", "sync", "report")}
    graph = graph.remove("batch", *tail).then(
        after=(), often=replace(sampler, updates_per_step=often)
    )
    return graph.then(after=(), seldom=replace(sampler, updates_per_step=seldom)).then(
        after=("often", "seldom"), mix=fl.Merge({"often": 1, "seldom": 1}), **tail
    )


def test_rates_that_agree_meet_where_streams_do():
    _, run = rows_of(two_draws(GRAPHS["dqn"], 0.25, 0.25), 3)
    edges = {edge.before: edge.got.items for edge in run.audit().edges if edge.after == "mix"}
    assert run.audit().closed and edges["often"] == edges["seldom"] > 0


def no_target(graph):
    return graph.remove("target")


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        (
            "dqn",
            lambda g: g.set("batch.learning_starts", 60_000),
            (
                r"dqn\.batch: waits for 60,000 steps, but replay holds 50,000; lower "
                r"learning_starts or raise buffer_size"
            ),
        ),
        (
            "dqn",
            no_target,
            r"dqn\.learner: nothing moves the target network of DQNLoss; add target=UpdateTarget",
        ),
        (
            "every setting",
            lambda g: g.remove("prio"),
            (
                r"dqn\.replay: its priorities are never set to what an update computed; add "
                r"prio=UpdatePriorities"
            ),
        ),
        (
            "dqn",
            lambda g: g.insert(after="train", prio=fl.UpdatePriorities()),
            r"dqn\.prio: the batch was sampled without priorities",
        ),
        (
            "dqn",
            lambda g: g.set("replay.buffer_size", 64).set("replay.n_step", 20),
            r"dqn\.add: replay holds 16 steps of each .*raise buffer_size to 96 or more",
        ),
        (
            "dqn",
            lambda g: g.remove("add"),
            (
                r"1 problem\n  dqn\.replay: nothing is added to it before batch; put "
                r"add=ReplayAdd\(\) in front of it"
            ),
        ),
        (
            "jax",
            lambda g: g.remove("add"),
            (
                r"dqn\.replay: nothing is added to it before batch; put add=ReplayAdd\(\) in front "
                r"of it"
            ),
        ),
        (
            "dqn",
            lambda g: g.remove("add").insert(after="batch", add=fl.ReplayAdd()),
            r"1 problem\n  dqn\.replay: nothing is added to it before batch",
        ),
        (
            "apex",
            lambda g: g.remove("add"),
            (
                r"apex\.replay: nothing is added to it before batch; put add=ReplayAdd\(\) in "
                r"front of it"
            ),
        ),
        (
            "apex",
            lambda g: g.set("replay.n_step", 5),
            (
                r"apex\.sample: prio: judges returns of n_step=3, gamma=0.99, but replay samples "
                r"those of n_step=5, gamma=0.99; give both the same"
            ),
        ),
        (
            "apex",
            lambda g: g.set("learner.loss", fl.losses.C51Loss()).set(
                "learner.policy", fl.Policy(fl.networks.QNetwork, atoms=51, v_min=-10, v_max=10)
            ),
            r"apex\.sample: prio: judges action values, but C51Loss whole distributions of returns",
        ),
        (
            "every setting",
            lambda g: g.insert(after="sample", judged=fl.InitialPriorities(gamma=0.5, n_step=3)),
            r"dqn\.judged: judges returns of .*gamma=0.5, but replay samples",
        ),
        (
            "dqn",
            lambda g: g.insert(after="sample", judged=fl.InitialPriorities()),
            (
                r"1 problem\n  dqn\.judged: gives new rows their first priorities, but replay "
                r"keeps none; write Replay\(\.\.\., prioritized=True\)"
            ),
        ),
        (
            "apex",
            lambda g: g.set("replay.prioritized", False).remove("prio"),
            (
                r"1 problem\n  apex\.sample: prio: gives new rows their first priorities, but "
                r"replay keeps none; .*, or remove this operator"
            ),
        ),
        (
            "dqn",
            lambda g: g.set("runners.explore", fl.Sampled()),
            (
                r"dqn\.runners: act by a stochastic policy, .*DQNLoss does not train them for "
                r"that; give runners explore=fl\.EpsilonGreedy\(\.\.\.\)"
            ),
        ),
        (
            "dqn",
            lambda g: g.set("runners.policy", fl.Policy(fl.networks.RNN)).set(
                "learner.policy", fl.Policy(fl.networks.RNN)
            ),
            (
                r"1 problem\n  dqn\.learner: DQNLoss trains on single transitions, "
                r"which a recurrent policy such as RNN can't; take fl"
            ),
        ),
        (
            "sac",
            lambda g: g.set("learner.loss", fl.losses.DQNLoss()),
            (
                r"sac\.learner: DQNLoss needs a policy whose outputs are action values "
                r"\(fl\.networks\.QNetwork, or TeamQNetwork for actions of several choices\), "
                r"not SACNetwork; "
                r"SACLoss is for fl\.networks\.SACNetwork"
            ),
        ),
        (
            "sac",
            lambda g: acting_by(fl.networks.MLP, g),
            (
                r"1 problem\n  sac\.learner: SACLoss needs a policy with critics "
                r"\(fl\.networks\.SACNetwork\), not MLP; DQNLoss is for fl\.networks\.QNetwork"
            ),
        ),
        (
            "dqn",
            lambda g: acting_by(fl.networks.MLP, g).set("learner.loss", fl.losses.PPOLoss()),
            (
                r"dqn\.train: PPOLoss needs the fields logp.*; take a loss that needs no more "
                r"than that \(DQNLoss, SACLoss, TD3Loss\)"
            ),
        ),
        (
            "dqn",
            lambda g: acting_by(fl.networks.MLP, g).set("learner.loss", fl.losses.PGLoss()),
            r"dqn\.train: PGLoss needs the fields advantage, .*\(DQNLoss, SACLoss, TD3Loss\)",
        ),
        (
            "dqn",
            lambda g: g.set("batch.learning_starts", 1).set("replay.n_step", 5),
            r"dqn\.batch: replay has nothing to sample: .* by 5 more, or by an end",
        ),
        (
            "jax",
            lambda g: g.set("batch.learning_starts", 1).set("replay.n_step", 5),
            r"dqn\.batch: replay has nothing to sample: .* by 5 more, or by an end",
        ),
        (
            "apex",
            lambda g: g.set("queue.max_lag", 5),
            (
                r"apex\.queue: .* can't be known before the run: it was sampled from a replay "
                r"\(remove max_lag\)"
            ),
        ),
        (
            "dqn",
            lambda g: g.set("sync.to", "producer"),
            r"dqn\.sync: .* which runner gave it: it was sampled from a replay \(take to='all'\)",
        ),
        (
            "dqn",
            lambda g: g.set("replay.shards", 9),
            r"9 shards have 4 environments between them; take as many at most",
        ),
        (
            "dqn",
            lambda g: two_draws(g, 0.25, 0.125),
            (
                r"no stage can go on.* often waits for capacity at mix, seldom waits for "
                r"something to do; rates that meet at mix must be as its weights say"
            ),
        ),
        (
            "dqn",
            lambda g: g.insert(after="batch", few=fl.Filter(lambda batch: batch.steps > 100)),
            r"dqn\.few: took .* items and yielded none",
        ),
        (
            "sac",
            lambda g: g.set("runners.env", "CartPole-v1"),
            r"SACNetwork is for actions in a Box, not Discrete\(2\); take QNetwork",
        ),
        (
            "dqn",
            lambda g: g.set("runners.env", "Pendulum-v1"),
            r"QNetwork has a value for each of n actions, not for Box.*take SACNetwork",
        ),
    ],
)
def test_what_is_wrong_is_reported_before_anything_runs(name, edit, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        edit(GRAPHS[name]).compile()


def drawn_before_it_is_added(graph):
    add = next(n.op for n in graph.nodes if n.name == "add")
    return graph.remove("add").then(after="sample", add=add)


@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.insert(after="add", gather=fl.Concat(64)),
        lambda g: g.insert(after="add", gate=fl.Gate(256)),
        drawn_before_it_is_added,
    ],
    ids=["gathered", "gated", "drawn before it is added"],
)
def test_a_draw_that_waits_for_items_keeps_its_ratio_and_stops_no_sampling(edit):
    plan = edit(GRAPHS["dqn"]).compile()
    _, run = rows_of(plan, 4)
    assert plan.total("replayed_steps") / plan.total("added_steps") == 4 and run.audit().closed


def test_an_update_that_is_not_finite_is_named_also_where_its_priorities_are_drawn_by():
    graph = (
        GRAPHS["every setting"]
        .set("learner.optimizer.lr", 1e30)
        .set("learner.optimizer.max_grad_norm", None)
        .set("report.every", 50)
    )
    with pytest.raises(fl.errors.NotFiniteError, match="update"):
        rows_of(graph, 3)


def test_each_of_two_replays_is_reported_the_priorities_of_its_own_rows(monkeypatch):
    met, prioritize = [], Ring.prioritize

    def reported(ring, slots, stamps, priorities):
        met.append((ring.rows, int(np.isin(stamps, ring.stamp).sum())))
        return prioritize(ring, slots, stamps, priorities)

    monkeypatch.setattr(Ring, "prioritize", reported)
    nodes = {n.name: n.op for n in GRAPHS["dqn"].nodes}
    graph = fl.Graph(
        "two",
        **GRAPHS["dqn"].resources
        | {"replay": fl.Replay(400, True), "long": fl.Replay(4_000, True, shards=2)},
    )
    graph = graph.then(sample=nodes["sample"], add=nodes["add"], keep=fl.ReplayAdd(replay="long"))
    graph = graph.then(after="keep", batch=fl.ReplaySample(8, learning_starts=64)).then(
        after="keep", recall=fl.ReplaySample(8, learning_starts=64, replay="long")
    )
    back = {"prio": fl.UpdatePriorities(), "prio_long": fl.UpdatePriorities(replay="long")}
    graph = graph.then(
        after=("batch", "recall"),
        mix=fl.Merge(),
        train=nodes["train"],
        **back,
        **{name: nodes[name] for name in ("target", "sync", "report")},
    )
    rows_of(graph, 2)
    assert set(met) == {(101, 8), (101, 0), (1001, 8), (1001, 0)}


@pytest.mark.parametrize("graph", ["dqn", "apex"])
def test_networks_are_dueling_where_that_is_asked_for_beside_tuned_settings(graph):
    settings = {"dqn": fl.DQNSettings, "apex": fl.ApexSettings}[graph](
        **tuned(graph, "CartPole-v1") | {"dueling": True}
    )
    assert getattr(fl, graph)("CartPole-v1", settings).resources["learner"].policy == fl.Policy(
        fl.networks.QNetwork, hidden=settings.hidden, dueling=True, normalize=False
    )


ONCE = DQN | {
    "updates_per_step": 1 / 16,
    "report_every": 2,
}  # one update a round; several are tested in tests/runtime/test_repetitions.py
FUSED = fl.dqn("gymnax:CartPole-v1", fl.DQNSettings(**ONCE, prioritized=True))


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(FUSED, marks=pytest.mark.system),
        pytest.param(
            fl.dqn("gymnax:CartPole-v1", fl.DQNSettings(**ONCE, num_runners=2, n_step=3)).set(
                "sample.mode", "async"
            ),
            marks=pytest.mark.system,
        ),
        pytest.param(
            fl.dqn("gymnax:CartPole-v1", fl.DQNSettings(**ONCE)).insert(
                after="batch", gather=fl.Concat(48)
            ),
            marks=pytest.mark.system,
        ),
        pytest.param(fl.sac("gymnax:Pendulum-v1", fl.SACSettings(**SAC)), marks=pytest.mark.system),
        pytest.param(fl.td3("gymnax:Pendulum-v1", **TD3), marks=pytest.mark.system),
        pytest.param(
            fl.td3("gymnax:Pendulum-v1", **{**TD3, "rollout_length": 4, "envs_per_runner": 3}),
            marks=pytest.mark.system,
        ),
    ],
    ids=["prioritized", "rollouts as they come", "samples are gathered", "sac", "td3", "td3, 3x4"],
)
def test_a_program_does_what_the_local_runtime_does(graph):
    (local, a), (fused, b) = rows_of(graph, 4), rows_of(graph, 4, runtime=fl.XlaRuntime(chunk=1))
    for k in ("env_steps", "updates", "loss", "q_mean"):
        np.testing.assert_allclose(
            [row[k] for row in fused], [row[k] for row in local], rtol=1e-3, err_msg=k
        )
    stocks = [run.audit().stocks["replay"] for run in (a, b)]
    assert a.counts()["target_updates"] >= b.counts().get(
        "target_updates", 0
    )  # what only a program decides is not counted
    assert (
        a.audit().closed
        and b.audit().closed
        and all(stock.held == stock.added > 0 for stock in stocks)
    )


@pytest.mark.system
def test_a_program_does_not_spell_out_what_a_counter_decides():
    graph = FUSED.set("target.every", 1_001).compile()
    assert periodicity(graph.graph, graph.found) == Periodicity(
        warmup=5, period=2, sections=(Section((Stretch(1, 2),)),), rounds=1, updates=1
    )


SHARDED = GRAPHS["every setting"].set("replay.shards", 2).set("replay.buffer_size", 2_000)


def test_shards_have_their_own_environments_and_take_turns():
    drawn = []
    see = Tap(
        lambda event: (
            drawn.append(event.item) if event.node == "batch" and event.item is not None else None
        ),
        OperatorRan,
    )
    with fl.run(SHARDED, observers=[see]) as run:
        for _ in range(4):
            next(run)
        rings = run._session.place.handles["replay"].pool.objects
    assert run.audit().closed and run.counts()["restarts"] == 0
    assert [ring.env_numbers.tolist() for ring in rings] == [[0, 1], [2, 3]]
    shards = [np.unique(batch.columns["shard"]).tolist() for batch in drawn]
    assert len(shards) > 4 and shards == ([[0], [1]] * len(shards))[: len(shards)]


@pytest.mark.system
def test_side_by_side_on_ray_the_ratio_is_the_planned_one(ray_up):
    plan = APEX.compile()
    _, run = rows_of(plan, 20, runtime=RAY)
    counts = run.counts()
    assert counts["replayed_steps"] / (counts["added_steps"] - 64) == pytest.approx(
        plan.total("replayed_steps") / plan.total("added_steps"), rel=0.03
    )
    assert run.audit().closed


@pytest.mark.system
def test_on_ray_the_same_rows_come(ray_up):
    for graph in (GRAPHS["every setting"], SHARDED):
        (local, _), (there, run) = rows_of(graph, 3), rows_of(graph, 3, runtime=RAY)
        np.testing.assert_allclose(
            [row["loss"] for row in there], [row["loss"] for row in local], rtol=1e-4
        )
        assert run.audit().closed


APEX = fl.apex(
    "CartPole-v1", fl.ApexSettings(**DQN | {"rollout_length": 8, "report_every": 20}, num_runners=2)
)


@pytest.mark.system
@pytest.mark.parametrize("graph", [SHARDED.set("report.every", 20), APEX], ids=["dqn", "apex"])
def test_a_shard_that_is_killed_is_reported_with_what_was_lost_and_refills(ray_up, graph):
    with fl.run(graph, runtime="ray") as run:
        next(run)
        replay = run._session.place.handles["replay"]
        victim = ray.get(replay.pool.actors[1].__ray_call__.remote(lambda _: os.getpid()))
        os.kill(victim, signal.SIGKILL)
        for _ in range(8):
            row = next(run)
        stock = replay.stock()
        assert stock.closed and stock.lost > 0 and replay.reports[1]["held"] > 0
        findings = run.profile().findings
    assert math.isfinite(row["loss"]) and run.audit().closed
    shards = run.profile().workers("replay")
    assert list(shards) == [f"replay, {i}" for i in range(2)]
    assert all(spent["replay"] > 0 for spent in shards.values())
    assert all(line in str(run.explain()) for line in shards)
    assert any(
        "1 shard was restarted" in text and f"{stock.lost:,} steps were lost" in text
        for text in findings
    )
    jax.block_until_ready(run.policy.weights)


def test_steps_that_come_while_the_stock_is_taken_are_in_it_wholly_or_not_at_all():
    with fl.run(SHARDED) as run:
        replay, batches = run._session.place.handles["replay"], []
        add = replay.add
        replay.add = lambda batch: (batches.append(batch), add(batch))
        next(run)

        class Slow:
            def result(
                self,
            ):  # what the last shard reported; meanwhile another thread adds to the first
                thread.start()
                thread.join(0.2)
                return replay.reports[1]

        thread = threading.Thread(target=add, args=(batches[-1],))
        replay.sending[1].append(Slow())
        before = replay.stock()
        thread.join()
        after = replay.stock()
    assert before.closed and after.closed and after.added == before.added + batches[-1].steps


@pytest.mark.system
def test_shards_that_share_a_process_are_lost_together_and_each_is_reported(ray_up):
    with fl.run(SHARDED.set("report.every", 20), runtime=fl.RayRuntime(processes=1)) as run:
        next(run)
        replay = run._session.place.handles["replay"]
        os.kill(
            ray.get(replay.pool.actors[0].__ray_call__.remote(lambda _: os.getpid())),
            signal.SIGKILL,
        )
        for _ in range(4):
            next(run)
        stock = replay.stock()
        assert stock.closed and stock.lost > 0 and replay.restart_counts == [1, 1]
    assert run.audit().closed


def exponents(env, beta_steps):
    """By the steps that came before each sample, the logarithms of its importance weights, of a run
    that learns nothing."""
    came, seen = [0], []

    def count(batch):
        came[0] += (
            0
            if isinstance(batch["reward"], jax.core.Tracer | jax.ShapeDtypeStruct)
            else batch.steps
        )
        return batch

    def look(batch):
        if not isinstance(weight := batch["weight"], jax.core.Tracer | jax.ShapeDtypeStruct):
            seen.append((came[0], np.log(np.asarray(weight, np.float64))))
        return batch

    graph = fl.dqn(env, fl.DQNSettings(**DQN, lr=0.0, prioritized=True, **beta_steps))
    rows_of(
        graph.insert(after="add", count=fl.Map(count)).insert(after="batch", look=fl.Map(look)), 3
    )
    return seen


@pytest.mark.system
@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_importance_weights_correct_for_more_and_more_of_the_priorities(env):
    """Without learning all runs sample the same, so that the logarithms of weights are as beta to
    beta."""
    never, by_90, default = (
        exponents(env, {"beta_steps": 0}),
        exponents(env, {"beta_steps": 90}),
        exponents(env, {}),
    )
    assert [
        any(log.min() < -0.05 for came, log in never if (came < 90) == early)
        for early in (True, False)
    ] == [True, True]
    for (came, log), (_, risen), (_, little) in zip(never, by_90, default, strict=True):
        np.testing.assert_allclose(
            risen, log * (0.4 + 0.6 * min(came / 90, 1)) / 0.4, rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(
            little, log * (0.4 + 0.6 * came / 100_000) / 0.4, rtol=1e-4, atol=1e-5
        )


def test_who_draws_by_priority_corrects_for_it_in_the_end_but_apex_as_its_paper_says():
    tuned_dqn = fl.DQNSettings(**fl.tuned("dqn", "CartPole-v1"))
    steps = [
        g.resources["replay"].beta_steps
        for g in (fl.dqn("CartPole-v1", tuned_dqn), fl.dqn(), fl.apex())
    ]
    assert steps == [100_000, 100_000, 0] and fl.Replay(10).beta_steps == 100_000
